"""The dynamic programming over layers compared with brute force."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.papers.galvatron import Tables, choose


def brute_force(tables: Tables, budget: float) -> float:
    """Return the seconds of the fastest row of strategies within the budget; infinite without one."""
    layers, count = tables.seconds.shape
    best = float("inf")
    for row in product(range(count), repeat=layers):
        picked = list(enumerate(row))
        memory = sum(tables.kept[each] for each in picked) + max(tables.working[each] for each in picked)
        if memory <= budget:
            changes = sum(tables.transitions[pair] for pair in pairwise(row))
            best = min(best, sum(tables.seconds[each] for each in picked) + changes)
    return float(best)


@settings(max_examples=40, deadline=None)
@given(layers=st.integers(1, 5), count=st.integers(1, 4), seed=st.integers(0, 10**6), budget=st.integers(0, 40))
def test_choices_equal_brute_force_within_the_budget(layers: int, count: int, seed: int, budget: int) -> None:
    """With bytes in whole units, and a working memory that is none or always the same, so that units stay whole."""
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0, 5, (layers, count))
    seconds[rng.random((layers, count)) < 0.1] = np.inf
    working = 4.0 * rng.integers(0, 2, (layers, count))
    kept = rng.integers(0, 12, (layers, count)).astype(float)
    tables = Tables(seconds, kept, working, rng.uniform(0, 2, (count, count)))
    # 40 x 36 units of the budget, or of what 4 working bytes leave of it, are whole parts of a byte.
    choice = choose(tables, float(budget), units=max(1, budget * max(1, budget - 4)))
    expected = brute_force(tables, budget)
    if np.isinf(expected):
        assert choice is None
        return
    assert choice is not None
    assert choice.seconds == pytest.approx(expected, rel=1e-12)
    picked = list(enumerate(choice.strategies))
    memory = sum(kept[each] for each in picked) + max(working[each] for each in picked)
    assert choice.memory_bytes == pytest.approx(memory)
    assert memory <= budget


@pytest.mark.parametrize("seed", range(4))
def test_coarse_units_never_go_over_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = rng.uniform(0, 3, (12, 4))
    tables = Tables(4 - kept + rng.uniform(0, 1, kept.shape), kept, rng.uniform(0, 2, kept.shape), np.zeros((4, 4)))
    choice = choose(tables, 20.0, units=40)
    assert choice is not None
    assert choice.memory_bytes <= 20.0


@pytest.mark.parametrize("seed", range(3))
def test_uniform_layers_take_one_strategy_unless_memory_binds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds, kept, transitions = rng.uniform(1, 2, 5), rng.uniform(1, 2, 5), rng.uniform(0.01, 1, (5, 5))
    np.fill_diagonal(transitions, 0)
    kept[seconds.argmin()] = 3.0  # the fastest is the largest
    tables = Tables(np.tile(seconds, (9, 1)), np.tile(kept, (9, 1)), np.zeros((9, 5)), transitions)
    roomy, tight = choose(tables, 9 * 3.0), choose(tables, 9 * 2.5)
    assert roomy is not None
    assert tight is not None
    assert set(roomy.strategies) == {int(seconds.argmin())}
    assert set(tight.strategies) != set(roomy.strategies)
    assert tight.seconds > roomy.seconds
