"""Megatron-LM's blending: greedy error diffusion, written down for a number of samples that is known.

Source: megatron-core's BlendedDataset and BlendedMegatronDatasetBuilder.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megapipe.data.errors import DataError

SURPLUS = 0.005
"""More samples of every corpus than its share are prepared, as Megatron-LM's mid_level_dataset_surplus has it."""


def normalized(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights of sum 1, rounded as Megatron-LM rounds them."""
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)


def samples_wanted(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples that every corpus is built for, in a blend of `num_samples`."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)) for weight in normalized(weights).tolist()]


class MegatronBlendOrder:
    """The first samples of a blend: sample i comes from the corpus with the largest w * max(i, 1) - count so far.

    num_samples: those of the run; the order holds a few more, as Megatron-LM's does.

    Raises DataError for samples behind its end.
    """

    def __init__(self, weights: Sequence[float], num_samples: int) -> None:
        shares = normalized(weights)
        self.num_samples = sum(math.ceil(num_samples * share) for share in shares.tolist())
        shares = normalized(shares.tolist())
        counts = np.zeros(len(shares))
        self._corpora = np.empty(self.num_samples, dtype=np.int16 if len(shares) < 2**15 else np.int64)
        self._within = np.empty(self.num_samples, dtype=np.int64)
        for ordinal in range(self.num_samples):
            corpus = int(np.argmax(shares * max(ordinal, 1) - counts))
            self._corpora[ordinal] = corpus
            self._within[ordinal] = counts[corpus]
            counts[corpus] += 1

    def assign(self, ordinals: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Corpus of each sample, and the sample's ordinal within that corpus: int64 of the shape of `ordinals`."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        if ordinals.size and (ordinals.min() < 0 or ordinals.max() >= self.num_samples):
            raise DataError(
                f"sample {ordinals.max()} does not exist: this blend was made for {self.num_samples} samples; set "
                "training.steps to the run's full length, and training.stop_at to end early"
            )
        return self._corpora[ordinals].astype(np.int64), self._within[ordinals]

    def check_supply(self, names: Sequence[str], supplies: Sequence[int]) -> None:
        """Raises DataError where a corpus has fewer samples than the blend takes; Megatron-LM fails there too."""
        taken = np.bincount(self._corpora, minlength=len(supplies)).tolist()
        for name, count, supply in zip(names, taken, supplies, strict=True):
            if count > supply:
                raise DataError(
                    f"data.order megatron needs {count} samples of {name}, which has {supply}: its blending can take "
                    "more samples than the weights say; give the corpus more weight, train longer, or set data.order "
                    "keyed"
                )

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """The place in the blend of a corpus's sample, both counted from 0; the blend's end where it has none."""
        places = np.flatnonzero(self._corpora == corpus)
        return int(places[sample]) if sample < len(places) else self.num_samples
