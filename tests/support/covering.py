"""Covering arrays: few combinations of values that hold every allowed pair (Cohen et al. 1997, the AETG system)."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, str]
Pair = frozenset[tuple[str, str]]
"""A pair of (axis, value)."""
Allowed = Callable[[Mapping[str, str]], bool]
"""Whether values of some of the axes go together; what it refuses it refuses whatever is added."""

CANDIDATES = 20
"""Cases that are tried for each one that is taken."""


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """Every two values of a case."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def completed(
    case: Case, axes: Mapping[str, Sequence[str]], allowed: Allowed, order: Callable[[Case, str], Sequence[str]]
) -> Case | None:
    """The case with a value for every axis, tried in `order`, the last choice taken back where nothing fits; None
    where there is no such case."""
    if not allowed(case):
        return None
    left = [axis for axis in axes if axis not in case]
    if not left:
        return case
    for value in order(case, left[0]):
        rest = completed({**case, left[0]: value}, axes, allowed, order)
        if rest is not None:
            return rest
    return None


def possible_pairs(axes: Mapping[str, Sequence[str]], allowed: Allowed) -> set[Pair]:
    """Pairs of values of two axes that some allowed case holds."""
    pairs: set[Pair] = set()
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            case = dict(zip((one, other), pair, strict=True))
            if frozenset(case.items()) in pairs:
                continue
            whole = completed(case, axes, allowed, lambda _, axis: axes[axis])
            if whole is not None:
                pairs |= pairs_of(whole)
    return pairs


def covering_array(axes: Mapping[str, Sequence[str]], allowed: Allowed, seed: int = 0) -> list[Case]:
    """Allowed cases that together hold every possible pair, greedily few; the same for the same arguments."""
    chance = random.Random(seed)
    missing = possible_pairs(axes, allowed)
    cases: list[Case] = []
    while missing:
        pairs = sorted(sorted(pair) for pair in missing)
        partners: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
        for one, other in pairs:
            partners[one].add(other)
            partners[other].add(one)
        candidates = [_candidate(axes, allowed, pairs, partners, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append({axis: best[axis] for axis in axes})
    return cases


def _candidate(
    axes: Mapping[str, Sequence[str]],
    allowed: Allowed,
    pairs: Sequence[Sequence[tuple[str, str]]],
    partners: Mapping[tuple[str, str], set[tuple[str, str]]],
    chance: random.Random,
) -> Case:
    """A case around one missing pair, every further value chosen for the missing pairs that it brings in."""
    start = dict(chance.choice(pairs))
    shuffled = dict(chance.sample(list(axes.items()), len(axes)))

    def order(case: Case, axis: str) -> list[str]:
        values = chance.sample(shuffled[axis], len(shuffled[axis]))
        return sorted(values, key=lambda value: len(partners[axis, value] & case.items()), reverse=True)

    candidate = completed(start, shuffled, allowed, order)
    assert candidate is not None  # a possible pair has a case
    return candidate
