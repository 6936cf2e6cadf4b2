"""The batch-size ramp: linear, in whole multiples of its start, a function of the consumed samples alone."""

import itertools
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.run import BatchConfig
from megapipe.layout.batch_plan import BatchPlan, ramp_problems


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    full = draw(st.integers(1, 64))
    return BatchPlan(full, draw(st.integers(1, full)), draw(st.integers(1, 500)))


@given(plans(), st.integers(0, 700))
def test_the_size_is_the_largest_multiple_below_the_line(plan: BatchPlan, consumed: int) -> None:
    line = plan.start + Fraction(plan.full - plan.start) * consumed / plan.samples
    multiples = [m for m in range(plan.start, plan.full + 1, plan.start) if m <= line]
    assert plan.size(consumed) == (plan.full if consumed >= plan.samples else max(multiples))
    assert plan.size(consumed) in plan.sizes()


@given(plans(), st.integers(0, 300), st.integers(0, 60))
def test_samples_after_steps_are_the_sum_of_sizes(plan: BatchPlan, consumed: int, steps: int) -> None:
    cursors = list(itertools.islice(plan.cursors(consumed), steps + 1))
    assert cursors[0] == consumed
    assert all(after - before == plan.size(before) for before, after in itertools.pairwise(cursors))
    assert plan.consumed_after(steps, consumed) == cursors[-1]


def test_a_configuration_has_a_plan() -> None:
    assert BatchPlan.of(BatchConfig(global_size=8)).sizes() == (8,)
    plan = BatchPlan.of(BatchConfig(global_size=10, ramp_start=4, ramp_samples=24))
    assert plan == BatchPlan(10, 4, 24)
    assert plan.sizes() == (4, 8, 10)


def test_sizes_must_be_whole_micro_batches_on_every_replica() -> None:
    batch = BatchConfig(global_size=24, micro_size=4, ramp_start=12, ramp_samples=10)
    assert ramp_problems(batch, share=12) == []
    (problem,) = ramp_problems(batch, share=8)
    assert "batch.ramp_start 12" in problem
    assert "8 or 16" in problem
    (problem,) = ramp_problems(replace(batch, ramp_start=None), share=16)
    assert "batch.global_size 24" in problem
    assert "use 16 or 32, or batch.micro_size 3, for example" in problem
