"""Sample sets made from others: blends of several corpora, and documents that are rearranged for fill-in-the-middle.

The order of a blend assigns a corpus to each sample, in proportions that hold for every prefix of the order. Weights
are converted to parts: whole numbers of samples in a period. In the first n samples of a period, every corpus has
n * parts / period samples, rounded up or down. After a period the order repeats, so sample 10^13 costs the same as
sample 0.

The k-th sample of a corpus with proportion w has a window: from (k - 1) / w, before which it would be more than a
sample too early, to k / w, after which it would be too late. Of the samples whose window has started, the sample whose
window ends first is next. With one sample per position and proportions with the sum 1, no sample misses its window, by
Hall's theorem: the windows within n positions belong to at most n samples. Source: Baruah, Cohen, Plaxton and Varvel,
"Proportionate progress", Algorithmica 15 (1996); Tijdeman, "The chairman assignment problem", Discrete Mathematics 32
(1980).

Fill-in-the-middle trains a model to write the text between two others. Source: Bavarian et al., "Efficient Training of
Language Models to Fill in the Middle", 2022, arXiv 2207.14255, sections 3 and 4.2; token level, per document within a
sample (context-level FIM).
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megapipe.data import DataError
from megapipe.data.samples import SampleSet


class CorpusOrder(Protocol):
    """Assigns a corpus to each sample of a blend."""

    def assign(self, ordinals: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each sample, and its ordinal within that corpus: int64 of the shape of `ordinals`."""
        ...

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """Return the position in the blend of a corpus's sample, both counted from 0."""
        ...


class _Samples(Protocol):
    """The samples of one corpus."""

    sequence_length: int

    def __len__(self) -> int: ...


Corpus = TypeVar("Corpus", bound=_Samples)


class Blend(Generic[Corpus]):
    """Sample o of the blend is the next sample of the corpus that `order` assigns to o.

    Every corpus has separate epochs. repeats: whether corpora start again after an epoch. If not, all samples after
    the first corpus has ended are empty, so that the proportions hold for all other samples (evaluation).
    """

    def __init__(self, corpora: Sequence[Corpus], order: CorpusOrder, *, repeats: bool) -> None:
        self.corpora = tuple(corpora)
        self.sequence_length = corpora[0].sequence_length
        self._order = order
        self._repeats = repeats
        self._num_samples = min(order.ordinal_of(index, len(corpus)) for index, corpus in enumerate(corpora))

    def __len__(self) -> int:
        """Return the number of samples until the first corpus is used up."""
        return self._num_samples

    def shares(self, ordinals: npt.ArrayLike) -> Iterator[tuple[Corpus, np.ndarray, np.ndarray]]:
        """Yield for each corpus of the batch: the corpus, its positions in the flat `ordinals`, and the ordinals of
        these samples within the corpus."""
        flat = np.asarray(ordinals, dtype=np.int64).reshape(-1)
        corpora, within = self._order.assign(flat)
        if not self._repeats:
            # Samples after the end of the blend are replaced by a sample after the end of a corpus, which is empty.
            is_after_end = flat >= len(self)
            corpora[is_after_end], within[is_after_end] = 0, len(self.corpora[0])
        for index in np.unique(corpora):
            positions = np.flatnonzero(corpora == index)
            yield self.corpora[index], positions, within[positions]


class BlendedSamples(Blend[SampleSet]):
    """GPT samples of several corpora."""

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.num_labels`."""
        counts = np.zeros(np.shape(ordinals), dtype=np.int64)
        for corpus, positions, within in self.shares(ordinals):
            counts.reshape(-1)[positions] = corpus.num_labels(within)
        return counts

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.tokens`. Raises DataError for an id outside the vocabulary."""
        tokens = np.zeros((*np.shape(ordinals), self.sequence_length + 1), dtype=np.int64)
        for corpus, positions, within in self.shares(ordinals):
            tokens.reshape(-1, self.sequence_length + 1)[positions] = corpus.tokens(within)
        return tokens

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """See `SampleSet.boundaries`."""
        starts = [np.empty(0, dtype=np.int64)] * np.size(ordinals)
        for corpus, positions, within in self.shares(ordinals):
            for place, boundaries in zip(positions, corpus.boundaries(within), strict=True):
                starts[place] = boundaries
        return starts


LONGEST_PERIOD = 2**20
"""Largest period. Weights that need a longer period are rounded to multiples of 1 / LONGEST_PERIOD."""

IntegerArray = npt.NDArray[np.int64]


class BlendOrder:
    """The endless sequence of corpora of a blend with these weights. All positions cost the same.

    weights: positive, with any sum. parts[d]: samples of corpus d in one period of `period` samples.

    LONGEST_PERIOD bounds the memory for corpora of any size. The order must never change, like the values of
    `KeyedPermutation`, because resumed runs continue in it.

    Raises DataError for a weight that is not a positive number, and for more corpora than LONGEST_PERIOD.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = whole_parts(weights)
        self.period = sum(self.parts)
        self._corpora = _one_period(self.parts)
        # Positions in a period, sorted by corpus; the positions of one corpus are ascending.
        self._places = np.argsort(self._corpora, kind="stable").astype(np.int32)
        self._firsts = np.concatenate([[0], np.cumsum(self.parts)])
        self._ranks = np.empty(self.period, dtype=np.int32)
        self._ranks[self._places] = np.arange(self.period) - self._firsts[self._corpora[self._places]]
        self._parts = np.array(self.parts, dtype=np.int64)

    def assign(self, ordinals: npt.ArrayLike) -> tuple[IntegerArray, IntegerArray]:
        """Return the corpus of each sample, and the number of samples of that corpus before it: int64 of the shape of
        `ordinals`."""
        periods, places = np.divmod(np.asarray(ordinals, dtype=np.int64), self.period)
        corpora = self._corpora[places].astype(np.int64)
        return corpora, periods * self._parts[corpora] + self._ranks[places]

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """Return the position in the blend of a corpus's sample, both counted from 0."""
        periods, rank = divmod(sample, self.parts[corpus])
        return periods * self.period + int(self._places[self._firsts[corpus] + rank])


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the weights' proportions, with the smallest sum, at most LONGEST_PERIOD.

    A weight is read as a decimal number: 0.1 is exactly a tenth. If no such numbers exist, return the nearest numbers
    with the sum LONGEST_PERIOD by the largest-remainder method, each at least 1.

    See `BlendOrder` for the errors.
    """
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(
                f"weight {index} of the blend is {weight}; every weight must be above 0: "
                "change it, or remove this corpus from the blend"
            )
    if not 1 <= len(weights) <= LONGEST_PERIOD:
        raise DataError(f"the blend has {len(weights)} corpora; it must have 1 to {LONGEST_PERIOD}")
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    if sum(numbers) <= LONGEST_PERIOD:
        return tuple(numbers)
    return _rounded(numbers)


def weights_are_rounded(weights: Sequence[float]) -> bool:
    """Return whether `whole_parts` of these weights have only approximately the same proportions."""
    parts, exact = whole_parts(weights), [Fraction(str(weight)) for weight in weights]
    return any(part * sum(exact) != sum(parts) * weight for part, weight in zip(parts, exact, strict=True))


def _rounded(numbers: Sequence[int]) -> tuple[int, ...]:
    total = sum(numbers)
    parts = [max(1, number * LONGEST_PERIOD // total) for number in numbers]
    missing = LONGEST_PERIOD - sum(parts)
    if missing >= 0:
        remainders = [number * LONGEST_PERIOD % total for number in numbers]
        for index in sorted(range(len(parts)), key=lambda index: (-remainders[index], index))[:missing]:
            parts[index] += 1
    # The smallest were rounded up to 1: take one part from each of the largest.
    while missing < 0:
        largest = max(parts)
        for index in [index for index, part in enumerate(parts) if part == largest][:-missing]:
            parts[index] -= 1
            missing += 1
    return tuple(parts)


def _one_period(parts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the corpus of every sample of a period: int32 [sum(parts)]."""
    period = sum(parts)
    corpora = np.repeat(np.arange(len(parts)), parts)
    firsts = np.concatenate([[0], np.cumsum(parts)])[corpora]
    shares = np.array(parts, dtype=np.int64)[corpora]
    earlier = np.arange(period) - firsts
    window_starts = earlier * period // shares
    window_ends = -((earlier + 1) * -period // shares)
    order = np.argsort(window_starts, kind="stable")
    started_counts = np.searchsorted(window_starts[order], np.arange(period), side="right").tolist()
    keys = (window_ends * len(parts) + corpora)[order].tolist()
    keys_in_order: list[int] = []
    heap: list[int] = []
    num_pushed = 0
    for num_started in started_counts:
        for key in keys[num_pushed:num_started]:
            heapq.heappush(heap, key)
        num_pushed = num_started
        keys_in_order.append(heapq.heappop(heap))
    return (np.array(keys_in_order) % len(parts)).astype(np.int32)


_DRAWS = 4
"""Number of random numbers for each document of a sample: whether to rearrange it, in which form, and two cuts."""

_STREAM = 0x46494D
"""Key that separates these random numbers from others with the same seed."""


@dataclass(frozen=True)
class FillInTheMiddleRule:
    """Parameters of fill-in-the-middle.

    rate: fraction of documents that are rearranged. suffix_first: fraction of these documents in which the suffix
    comes first. prefix, suffix, middle: ids of the three special tokens. end_of_document: id that stays at the end of
    a document, if any.
    """

    rate: float
    suffix_first: float
    prefix: int
    suffix: int
    middle: int
    end_of_document: int | None


class FillInTheMiddle:
    """Samples whose documents are rearranged with some probability, differently in every sample.

    A text is cut at two random positions into prefix, middle and suffix, and becomes PREFIX prefix SUFFIX suffix
    MIDDLE middle or, with the suffix first, PREFIX SUFFIX suffix MIDDLE prefix middle. Its first three tokens are
    dropped to make room for the special tokens. Lengths, boundaries and masks therefore do not change, and stages that
    read no tokens are not affected. Texts of at most three tokens stay unchanged.

    The random numbers are a function of the seed, the sample's ordinal and the document's position in it.
    """

    def __init__(self, samples: SampleSet, rule: FillInTheMiddleRule, seed: int) -> None:
        self.sequence_length = samples.sequence_length
        self._samples = samples
        self._rule = rule
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._samples)

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.num_labels`."""
        return self._samples.num_labels(ordinals)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """See `SampleSet.boundaries`."""
        return self._samples.boundaries(ordinals)

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.tokens`."""
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
        """Return uniform numbers in [0, 1): float64 [documents, _DRAWS]."""
        words = np.random.Philox(key=self._seed, counter=[0, ordinal, 0, _STREAM]).random_raw(_DRAWS * num_documents)
        return ((words >> np.uint64(11)) * 2.0**-53).reshape(num_documents, _DRAWS)

    def _rearrange(self, document: np.ndarray, draw: np.ndarray) -> None:
        """Rearrange a document's tokens in place."""
        rule = self._rule
        if draw[0] >= rule.rate:
            return
        text = document[:-1] if len(document) and document[-1] == rule.end_of_document else document
        if len(text) <= 3:
            return
        body = text[3:].copy()
        first, second = sorted(int(value * (len(body) + 1)) for value in draw[2:])
        before, between, after = body[:first], body[first:second], body[second:]
        if draw[1] < rule.suffix_first:
            text[:] = [rule.prefix, rule.suffix, *after, rule.middle, *before, *between]
        else:
            text[:] = [rule.prefix, *before, rule.suffix, *after, rule.middle, *between]
