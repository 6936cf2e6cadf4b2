"""Fill-in-the-middle: documents rearranged so that a model learns to write what stands between two texts.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022, arXiv 2207.14255,
sections 3 and 4.2; token level, per document within a sample (context-level FIM).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megapipe.data.sample_set import SampleSet

_DRAWS = 4
"""Random words for each document of a sample: whether, how, and two cuts."""

_STREAM = 0x46494D
"""Tells these random numbers from others of the same seed."""


@dataclass(frozen=True)
class FillInTheMiddleRule:
    """rate: share of documents that are rearranged. suffix_first: of those, the share whose suffix stands first.

    prefix, suffix, middle: the ids of the three marks. end_of_document: the id that stays at a document's end, if any.
    """

    rate: float
    suffix_first: float
    prefix: int
    suffix: int
    middle: int
    end_of_document: int | None


class FillInTheMiddle:
    """Samples whose documents are rearranged with some probability, each anew in every sample.

    A text is cut at two random places into prefix, middle and suffix, and becomes
    PREFIX prefix SUFFIX suffix MIDDLE middle, or, suffix first, PREFIX SUFFIX suffix MIDDLE prefix middle.
    Its first three tokens make room for the marks: lengths, boundaries and masks are those of the samples it wraps,
    and stages that read no tokens need not know of it. Texts of three tokens or fewer stay as they are.

    The random numbers are a function of the seed, the sample's ordinal and the document's place in it.
    """

    def __init__(self, samples: SampleSet, rule: FillInTheMiddleRule, seed: int) -> None:
        self.sequence_length = samples.sequence_length
        self._samples = samples
        self._rule = rule
        self._seed = seed

    def __len__(self) -> int:
        """Samples per epoch."""
        return len(self._samples)

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it."""
        return self._samples.num_labels(ordinals)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """As `SampleSet` has it."""
        return self._samples.boundaries(ordinals)

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        tokens = self._samples.tokens(ordinals)
        rows = zip(
            tokens.reshape(-1, self.sequence_length + 1),
            ordinals.flat,
            self._samples.num_labels(ordinals).flat,
            self._samples.boundaries(ordinals),
            strict=True,
        )
        for row, ordinal, count, boundaries in rows:
            ends = [*boundaries.tolist(), int(count) + 1]
            draws = self._draws(int(ordinal), len(ends))
            for begin, end, draw in zip([0, *ends[:-1]], ends, draws, strict=True):
                self._rearrange(row[begin:end], draw)
        return tokens

    def _draws(self, ordinal: int, num_documents: int) -> np.ndarray:
        """Uniform numbers in [0, 1): float64 [documents, _DRAWS]."""
        words = np.random.Philox(key=self._seed, counter=[0, ordinal, 0, _STREAM]).random_raw(_DRAWS * num_documents)
        uniform: np.ndarray = ((words >> np.uint64(11)) * 2.0**-53).reshape(num_documents, _DRAWS)
        return uniform

    def _rearrange(self, document: np.ndarray, draw: np.ndarray) -> None:
        """Rearrange a document's tokens in place."""
        rule = self._rule
        if draw[0] >= rule.rate:
            return
        text = document[:-1] if len(document) and document[-1] == rule.end_of_document else document
        if len(text) <= 3:
            return
        kept = text[3:].copy()
        first, second = sorted(int(value * (len(kept) + 1)) for value in draw[2:])
        before, between, behind = kept[:first], kept[first:second], kept[second:]
        if draw[1] < rule.suffix_first:
            text[:] = [rule.prefix, rule.suffix, *behind, rule.middle, *before, *between]
        else:
            text[:] = [rule.prefix, *before, rule.suffix, *behind, rule.middle, *between]
