"""The keyed permutation is a bijection, the same everywhere, and looks uniform."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapipe.random.sampling import FEW, LARGEST_SIZE, LARGEST_TABLE, KeyedPermutation
from tests.random.uniform import excess

MASK = 2**64 - 1
TEN_TRILLION = 10**13
FROZEN_TEN = [2, 5, 0, 3, 1, 7, 4, 8, 9, 6]
FROZEN_TEN_TRILLION = [5544365648680, 2602630854712, 8667984202255]


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def permuted_in_exact_integers(position: int, size: int, *key: int) -> int:
    """The same network in Python's unbounded integers, which cannot overflow."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=64).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]
    rows = next(r for r in range(max(1, math.isqrt(size) - 1), size + 1) if r * r >= size)
    columns = (size + rows - 1) // rows
    while True:
        left, right = position // columns, position % columns
        for i in range(0, 8, 2):
            left = (left + mix((right + words[i]) & MASK)) % rows
            right = (right + mix((left + words[i + 1]) & MASK)) % columns
        position = left * columns + right
        if position < size:
            return position


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 20_000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
@example(size=LARGEST_TABLE, seed=0, epoch=0)
@example(size=LARGEST_TABLE + 1, seed=0, epoch=0)
@example(size=4225, seed=0, epoch=0)
def test_every_element_appears_exactly_once(size: int, seed: int, epoch: int) -> None:
    images = KeyedPermutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(LARGEST_TABLE + 1, LARGEST_SIZE), seed=st.integers(0, 2**64), data=st.data())
@example(size=TEN_TRILLION, seed=7, data=None)
@example(size=LARGEST_SIZE, seed=7, data=None)
def test_large_sizes_equal_exact_integer_arithmetic(size: int, seed: int, data: st.DataObject | None) -> None:
    position = size - 1 if data is None else data.draw(st.integers(0, size - 1))
    permutation = KeyedPermutation(size, seed, 3)
    expected = permuted_in_exact_integers(position, size, seed, 3)
    assert permutation[position] == expected
    assert permutation([[position, 0]])[0, 0] == expected


@settings(max_examples=60, deadline=None)
@given(size=st.integers(LARGEST_TABLE + 1, LARGEST_SIZE), seed=st.integers(0, 2**63), data=st.data())
def test_few_positions_at_a_time_give_what_many_do(size: int, seed: int, data: st.DataObject) -> None:
    permutation = KeyedPermutation(size, seed, 3)
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=FEW + 1, max_size=4 * FEW))
    together = permutation(positions).tolist()
    assert [permutation[position] for position in positions] == together
    pairs = permutation(np.array(positions[:FEW]).reshape(2, -1))
    assert pairs.dtype == np.int64
    assert pairs.ravel().tolist() == together[:FEW]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_orders_of_a_small_set_are_equally_likely(size: int) -> None:
    trials = 40 * math.factorial(size)
    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    for epoch in range(trials):
        counts[tuple(KeyedPermutation(size, 11, epoch)(np.arange(size)).tolist())] += 1
    assert excess(np.array(list(counts.values()))) < 5


@pytest.mark.parametrize("size", [4096, 5000, 1_000_003, TEN_TRILLION])
def test_places_and_steps_are_uniform(size: int) -> None:
    """Where an element lands, over keys; where neighbours land, within a key; and how far apart they land."""
    bins = 50
    first = np.array([KeyedPermutation(size, epoch, 5)[0] for epoch in range(4000)])
    assert excess(np.bincount(first * bins // size, minlength=bins)) < 5
    images = KeyedPermutation(size, 3, 5)(np.arange(min(size, 200_000) // 2 * 2))
    pairs = (images[0::2] * 8 // size) * 8 + images[1::2] * 8 // size
    assert excess(np.bincount(pairs, minlength=64)) < 5
    steps = np.diff(images) % size
    assert excess(np.bincount(steps * bins // size, minlength=bins)) < 5


def test_keys_give_independent_orders() -> None:
    size = 100_000
    orders = [KeyedPermutation(size, *key)(np.arange(size)) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 10)]]
    for one, other in itertools.combinations(orders, 2):
        agreements = int((one == other).sum())
        assert agreements <= 12  # Poisson with mean 1: more than 12 has probability 6e-11
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)


def test_values_never_change() -> None:
    """Runs resume on these values: a change of them is a change of every run's data order."""
    assert KeyedPermutation(10, 1234, 0)(np.arange(10)).tolist() == FROZEN_TEN
    assert [KeyedPermutation(TEN_TRILLION, 1234, 1)[i] for i in range(3)] == FROZEN_TEN_TRILLION


@pytest.mark.parametrize("size", [0, -1, LARGEST_SIZE + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        KeyedPermutation(size, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"outside \[0, 10\)"):
        KeyedPermutation(10, 0)[position]
