"""Draws are a function of seed, purpose and number, and are fair."""

import numpy as np
import pytest

from megapipe.random.sampling import Draws
from tests.random.uniform import excess


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
