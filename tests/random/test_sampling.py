"""Keyed permutations and draws: functions of their keys alone, the same everywhere, and uniform."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapipe.random.sampling import FEW, LARGEST_SIZE, LARGEST_TABLE, Draws, KeyedPermutation
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


def test_the_same_item_draws_the_same_and_others_others() -> None:
    def drawn(*key: object) -> list[int]:
        draws = Draws(*key)  # type: ignore[arg-type]
        return [draws.below(10**9), int(draws.chance(0.5)), draws.heads(100), *draws.order(5).tolist()]

    assert drawn(1, "a", 7) == drawn(1, "a", 7)
    others = [drawn(1, "a", 7), drawn(2, "a", 7), drawn(1, "b", 7), drawn(1, "a", 8), drawn(1, "a", 2**63)]
    assert len({tuple(each) for each in others}) == len(others)


def test_streams_are_numpys_philox_with_the_number_as_counter() -> None:
    draws = Draws(3, "a", 5)
    again = np.random.Philox(key=draws._philox.state["state"]["key"], counter=[0, 0, 5, 0])
    assert draws.words(8).tolist() == again.random_raw(8).tolist()


def test_values_that_runs_resume_on() -> None:
    draws = Draws(1234, "bert masks of train", 99)
    assert [draws.below(1000) for _ in range(4)] == [514, 981, 167, 171]
    assert draws.order(6).tolist() == [2, 0, 1, 3, 4, 5]


@pytest.mark.parametrize("tosses", [1, 3, 63, 64, 65, 500])
def test_coins_are_fair(tosses: int) -> None:
    counts = [Draws(0, "coins", number).heads(tosses) for number in range(2000)]
    assert 0 <= min(counts) <= max(counts) <= tosses
    error = 5 * (tosses / 4 / len(counts)) ** 0.5
    assert abs(np.mean(counts) - tosses / 2) < error
    assert np.var(counts) == pytest.approx(tosses / 4, rel=0.2)


def test_numbers_below_a_bound_are_equally_likely() -> None:
    draws = Draws(0, "numbers", 0)
    counts = np.bincount([draws.below(7) for _ in range(14_000)], minlength=7)
    assert len(counts) == 7
    assert excess(counts) < 5


def test_chances_are_kept() -> None:
    draws = Draws(0, "chances", 0)
    hits = sum(draws.chance(0.1) for _ in range(20_000))
    assert abs(hits - 2000) < 5 * (20_000 * 0.09) ** 0.5
    assert not any(draws.chance(0.0) for _ in range(1000))
    assert all(draws.chance(1.0) for _ in range(1000))


def test_fractions_fill_the_unit_interval() -> None:
    fractions = np.sort(Draws(0, "fractions", 0).fractions(10_000))
    assert fractions[0] >= 0.0
    assert fractions[-1] < 1.0
    # Kolmogorov-Smirnov: exceeded once in 10,000.
    assert np.abs(fractions - (np.arange(10_000) + 0.5) / 10_000).max() < 2.2 / 100


def test_orders_are_permutations_each_as_likely() -> None:
    orders = [tuple(Draws(0, "orders", number).order(3)) for number in range(6000)]
    counts = np.array([orders.count(each) for each in set(orders)])
    assert len(counts) == 6
    assert excess(counts) < 5
