"""Spikes of the loss and samples left out: the rules, against plain words for them."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.run import SpikesConfig
from megapipe.layout.batch_plan import BatchPlan
from megapipe.training.loop.loader import SkippingPlan
from megapipe.training.resilience.guards import spike_limit


def test_a_limit_is_the_given_deviations_above_the_median() -> None:
    chosen = random.Random(0)
    losses = [chosen.gauss(3.0, 0.1) for _ in range(50)]
    limit = spike_limit(SpikesConfig(deviations=10.0), losses)
    # The median absolute deviation estimates the standard deviation of normal numbers, and outliers move it little.
    assert limit == pytest.approx(3.0 + 10.0 * statistics.stdev(losses), rel=0.1)
    assert spike_limit(SpikesConfig(deviations=10.0), [*losses[:-3], 50.0, math.nan, 60.0]) < 5.0
    assert max(losses) < limit


def test_nothing_is_judged_too_early_and_a_threshold_always() -> None:
    assert spike_limit(SpikesConfig(deviations=10.0, window=8), [3.0, 3.1, 2.9]) == math.inf
    assert spike_limit(SpikesConfig(deviations=10.0, window=8), [3.0, 3.1, 2.9, 3.0]) < 4.0
    assert spike_limit(SpikesConfig(threshold=7.0), []) == 7.0
    assert spike_limit(SpikesConfig(), [1.0] * 100) == math.inf
    assert spike_limit(SpikesConfig(deviations=10.0), [3.0] * 50) == pytest.approx(3.03)


@given(
    full=st.integers(1, 9),
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), max_size=4),
    steps=st.integers(1, 12),
)
def test_steps_skip_the_ranges_samples_and_nothing_else(full: int, ranges: list[tuple[int, int]], steps: int) -> None:
    skipped = tuple((first, first + length) for first, length in ranges)
    plan = SkippingPlan(BatchPlan(full, full, 0), skipped)
    consumed, taken = 0, []
    cursors = plan.cursors(0)
    for _ in range(steps):
        begin = next(cursors)
        assert begin == plan.begin(consumed)
        if begin > consumed:  # a skip ends where a range ends, because a batch before that would overlap one
            assert begin in {stop for _, stop in skipped}
        taken += range(begin, begin + full)
        consumed = plan.end(consumed)
        assert consumed == begin + full
    assert not any(first <= sample < stop for sample in taken for first, stop in skipped)
    assert len(set(taken)) == len(taken) == steps * full
    assert not skipped or plan.ranges == tuple(sorted(set(skipped)))
    # The cursor alone says where a run goes on.
    assert next(plan.cursors(consumed)) == next(cursors)


def test_the_last_batches_before_a_spike() -> None:
    plan = SkippingPlan(BatchPlan(8, 2, 16))
    starts = [0, 2, 4, 6, 10, 14, 20, 28]
    cursors = plan.cursors(0)
    assert [next(cursors) for _ in starts] == starts
    assert plan.last_batches(0, 20, 1) == (14, 20)
    assert plan.last_batches(0, 20, 3) == (6, 20)
    assert plan.last_batches(10, 20, 99) == (10, 20)
