"""The order in which Megatron-LM draws and blends samples, to compare runs with its runs batch by batch.

Unlike the default order of this project, it is built at the start, for a known number of samples. It takes time and
memory proportional to the documents and samples of the run. Source: megatron-core's GPTDataset, BlendedDataset and
BlendedMegatronDatasetBuilder; tests compare the indices with GPTDataset's token by token.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data import DataError
from megapipe.data.samples import RangeSamples, SplitName, split_documents

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if less than this fraction of it is needed."""


class MegatronSamples(RangeSamples):
    """Samples of one split of a shard in Megatron-LM's order, which splits and shuffles sequences.

    The sequences of all epochs of the split are shuffled together (the last epoch may be shuffled separately) and
    concatenated. Sample w contains tokens [w * L, w * L + L], and ordinal o reads sample shuffle[o]. num_samples: the
    number of samples of the run, which determines the number of epochs, and therefore the order of all samples.

    Raises DataError for unusable shards, a split that is too small for one sample, and ordinals after the last sample.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        split: SplitName,
        shares: str,
        sequence_length: int,
        seed: int,
        num_samples: int,
        vocabulary_size: int | None = None,
    ) -> None:
        super().__init__(prefix, sequence_length, vocabulary_size)
        sequences = split_documents(self._shard.num_sequences, shares)[split]
        lengths = self._shard.sequence_lengths[sequences.start : sequences.stop].astype(np.int64)
        per_epoch = int(lengths.sum())
        if per_epoch <= sequence_length:
            raise DataError(
                f"the {split} split of {prefix} has {len(sequences)} of {self._shard.num_sequences} sequences and "
                f"{per_epoch} tokens, too few for one sample of {sequence_length} + 1: give it a larger share than in "
                f"data.split {shares!r}, lower data.sequence_length, or add documents"
            )
        epochs = max(1, -(-(num_samples * sequence_length + 1) // per_epoch))
        self._num_samples = (epochs * per_epoch - 1) // sequence_length
        without_last = ((epochs - 1) * per_epoch - 1) // sequence_length
        needed = num_samples - without_last
        separate = epochs > 1 and needed < int(SEPARATE_BELOW * ((per_epoch - 1) // sequence_length))

        # Random numbers are drawn in Megatron-LM's order: documents, then samples.
        generator = np.random.RandomState(seed)
        one_epoch = np.arange(sequences.start, sequences.stop, dtype=np.int32)
        dtype = np.uint32 if self._num_samples < 2**32 - 2 else np.int64
        edges = [0, without_last, self._num_samples] if separate else [0, self._num_samples]
        in_epochs = [np.tile(one_epoch, each) for each in ([epochs - 1, 1] if separate else [epochs])]
        windows = [np.arange(first, stop, dtype=dtype) for first, stop in pairwise(edges)]
        for part in (*in_epochs, *windows):
            generator.shuffle(part)
        self._sequences, self._shuffle = np.concatenate(in_epochs), np.concatenate(windows)
        self._starts = np.concatenate([[0], np.cumsum(lengths[self._sequences - sequences.start])])
        """Position of every sequence of all epochs in their concatenated tokens."""

    def __len__(self) -> int:
        """Return the number of samples of all epochs that were shuffled."""
        return self._num_samples

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.num_labels`. Every sample is full."""
        return np.full_like(self._windows(ordinals), self.sequence_length)

    def _ranges(self, ordinals: npt.ArrayLike) -> list[list[tuple[int, int]]]:
        """Return the part of each sequence in each sample, without empty sequences."""
        ranges = []
        for window in self._windows(ordinals).flat:
            start = int(window) * self.sequence_length
            last = start + self.sequence_length
            first, stop = np.searchsorted(self._starts, [start, last], side="right")
            starts = self._starts[first - 1 : stop + 1]
            offsets = self._shard.sequence_offsets[self._sequences[first - 1 : stop]]
            shifts = offsets // self._shard.dtype.itemsize - starts[:-1]
            cuts = np.clip(starts, start, last + 1)
            begins, ends = cuts[:-1] + shifts, cuts[1:] + shifts
            pairs = zip(begins.tolist(), ends.tolist(), strict=True)
            ranges.append([(begin, end) for begin, end in pairs if begin < end])
        return ranges

    def _windows(self, ordinals: npt.ArrayLike) -> np.ndarray:
        ordinals = np.asarray(ordinals, dtype=np.int64)
        outside = ordinals[(ordinals < 0) | (ordinals >= self._num_samples)]
        if outside.size:
            raise DataError(
                f"sample {outside[0]} of {self._shard.prefix} does not exist: data.order "
                f"megatron was made for {self._num_samples} samples (from training.steps); "
                "set training.steps to the full length, and training.stop_at to end early"
            )
        return np.asarray(self._shuffle[ordinals].astype(np.int64))


SURPLUS = 0.005
"""Fraction of additional samples that are prepared of every corpus: Megatron-LM's mid_level_dataset_surplus."""


def normalized(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return weights with the sum 1, with the same rounding as in Megatron-LM."""
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)


def samples_wanted(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return the number of samples for which every corpus is built, in a blend of `num_samples`."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)) for weight in normalized(weights).tolist()]


class MegatronBlendOrder:
    """Order of the first samples of a blend: sample i comes from the corpus with the largest w * max(i, 1) - count.

    w is the weight of a corpus, and count is the number of its samples so far.

    num_samples: samples of the run; the order has a few more, like Megatron-LM's.

    Raises DataError for samples after its end.
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
        """Return the corpus of each sample, and its ordinal within that corpus: int64 of the shape of `ordinals`."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        outside = ordinals[(ordinals < 0) | (ordinals >= self.num_samples)]
        if outside.size:
            raise DataError(
                f"sample {outside[0]} does not exist: this blend was made for {self.num_samples} samples; set "
                "training.steps to the run's full length, and training.stop_at to end early"
            )
        return self._corpora[ordinals].astype(np.int64), self._within[ordinals]

    def check_supply(self, names: Sequence[str], supplies: Sequence[int]) -> None:
        """Raise DataError if a corpus has fewer samples than the blend uses; Megatron-LM fails in this case too."""
        taken = np.bincount(self._corpora, minlength=len(supplies)).tolist()
        for name, count, supply in zip(names, taken, supplies, strict=True):
            if count > supply:
                raise DataError(
                    f"data.order megatron needs {count} samples of {name}, which has "
                    f"{supply}: its blending can take more samples than the weights say; give "
                    "the corpus more weight, train longer, or set data.order keyed"
                )

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """Return the position in the blend of a corpus's sample, both counted from 0. Return the blend's length if it
        does not contain the sample."""
        places = np.flatnonzero(self._corpora == corpus)
        return int(places[sample]) if sample < len(places) else self.num_samples
