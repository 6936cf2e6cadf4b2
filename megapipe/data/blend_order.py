"""Which corpus each sample of a blend comes from, in proportions that hold at every prefix.

The weights are whole parts of a period. Within a period every corpus keeps its quota: of the first n samples it has
n * parts / period, rounded up or down. Behind a period the order repeats, so that sample 10^13 costs what sample 0
does.

The k-th sample of a corpus with a share w has a window: from (k - 1) / w, where an earlier one would be more than a
sample too early, to k / w, where a later one would be too late. Of the samples whose window has begun, the one whose
window ends first is next. With one place a sample and shares that add up to 1 no window is ever missed, by Hall's
theorem: the windows that lie within n places belong to at most n samples.
Source: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", Algorithmica 15 (1996); Tijdeman, "The chairman
assignment problem", Discrete Mathematics 32 (1980).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megapipe.data.errors import DataError

LONGEST_PERIOD = 2**20
"""Weights that are no ratios of whole numbers with at most this sum are rounded to parts of it."""

IntegerArray = npt.NDArray[np.int64]


class BlendOrder:
    """The sequence of corpora of a blend with these weights, endless, from anywhere at the same cost.

    weights: positive, of any sum. parts[d]: samples of corpus d in one period of `period` samples.

    Memory is bounded by LONGEST_PERIOD, whatever the corpora hold. The values are part of the project's contract, as
    those of `KeyedPermutation` are: a run resumes on them.

    Raises DataError for a weight that is not a positive number, and for more corpora than a period has parts.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = whole_parts(weights)
        self.period = sum(self.parts)
        self._corpora = _one_period(self.parts)
        # Places of a period by corpus, those of one corpus ascending.
        self._places = np.argsort(self._corpora, kind="stable").astype(np.int32)
        self._firsts = np.concatenate([[0], np.cumsum(self.parts)])
        self._ranks = np.empty(self.period, dtype=np.int32)
        self._ranks[self._places] = np.arange(self.period) - self._firsts[self._corpora[self._places]]
        self._parts = np.array(self.parts, dtype=np.int64)

    def assign(self, ordinals: npt.ArrayLike) -> tuple[IntegerArray, IntegerArray]:
        """Corpus of each sample and how many samples of that corpus came before it, int64 like `ordinals`."""
        periods, places = np.divmod(np.asarray(ordinals, dtype=np.int64), self.period)
        corpora = self._corpora[places].astype(np.int64)
        return corpora, periods * self._parts[corpora] + self._ranks[places]

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """The place in the blend of a corpus's sample, both counted from 0."""
        periods, rank = divmod(sample, self.parts[corpus])
        return periods * self.period + int(self._places[self._firsts[corpus] + rank])

    def counts(self, prefix: int) -> IntegerArray:
        """Samples of every corpus among the first `prefix` ones of the blend, int64 [corpora]."""
        periods, rest = divmod(prefix, self.period)
        return periods * self._parts + np.bincount(self._corpora[:rest], minlength=len(self.parts))


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the weights' proportions, of the smallest sum, at most LONGEST_PERIOD.

    A weight counts as the decimal it is written as: 0.1 is a tenth. Where no such numbers exist, the nearest ones of
    sum LONGEST_PERIOD by largest remainders, none below 1.

    Raises DataError as `BlendOrder` does.
    """
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(
                f"weight {index} of the blend is {weight}; every weight must be above 0: change it, or remove this "
                "corpus from the blend"
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
    """Whether the parts of these weights are only nearly in their proportions."""
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
    while missing < 0:  # the smallest were rounded up to 1: at most one part a corpus is to be taken back
        largest = max(parts)
        for index in [index for index, part in enumerate(parts) if part == largest][:-missing]:
            parts[index] -= 1
            missing += 1
    return tuple(parts)


def _one_period(parts: Sequence[int]) -> npt.NDArray[np.int32]:
    """The corpus of every sample of a period: int32 [sum(parts)]."""
    period = sum(parts)
    corpora = np.repeat(np.arange(len(parts)), parts)
    firsts = np.concatenate([[0], np.cumsum(parts)])[corpora]
    shares = np.array(parts, dtype=np.int64)[corpora]
    earlier = np.arange(period) - firsts
    begins = earlier * period // shares
    ends = -((earlier + 1) * -period // shares)
    order = np.argsort(begins, kind="stable")
    begun = np.searchsorted(begins[order], np.arange(period), side="right").tolist()
    keys = (ends * len(parts) + corpora)[order].tolist()
    picked: list[int] = []
    waiting: list[int] = []
    known = 0
    for stop in begun:
        for key in keys[known:stop]:
            heapq.heappush(waiting, key)
        known = stop
        picked.append(heapq.heappop(waiting))
    return (np.array(picked) % len(parts)).astype(np.int32)
