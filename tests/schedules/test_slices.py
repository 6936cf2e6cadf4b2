"""Slices of sequences as units of a schedule: figures of Seq1F1B, and times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.schedules import build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import Kind
from megapipe.schedules.simulation import CostPlace
from tests.schedules.support import words


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5))
def test_seq1f1b_has_the_figures_of_its_paper(ranks, microbatches, slices):
    """Bubble (p - 1) / (s m) of the ideal time and (p + s - 1) / s micro-batches on rank 0 (golden: p = m = 8, s = 4
    leaves .219 and 2.75), where there are units enough to fill the pipeline."""
    schedule = build("seq1f1b", ranks, microbatches, slices=slices)
    report = validate(schedule)
    simulation = simulate(schedule, rank_costs(schedule.header, forward=1.0, backward=2.0))
    if microbatches * slices >= ranks + slices - 1:
        assert simulation.bubble == pytest.approx((ranks - 1) / (slices * microbatches))
        assert report.peak_activations[0] == pytest.approx((ranks + slices - 1) / slices)
    assert loads(dumps(schedule)) == schedule


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), st.integers(1, 5))
def test_interleaved_slices_have_the_figures_of_the_paper(ranks, rounds, chunks, slices):
    """Bubble (p - 1) / (v s m), and the warm-up and one forward on rank 0, in groups of g slices:
    ((v - 1) g + 2 (p - 1) + s) / (v s) micro-batches. s divides g; the paper's groups have p slices."""
    group = -(-ranks // slices) * slices
    microbatches = rounds * group // slices
    schedule = build("seq1f1b", ranks, microbatches, chunks=chunks, slices=slices)
    report = validate(schedule)
    simulation = simulate(schedule, rank_costs(schedule.header, forward=1.0, backward=2.0))
    assert simulation.bubble == pytest.approx((ranks - 1) / (chunks * slices * microbatches))
    in_flight = min(2 * (ranks - 1), 2 * group) + (chunks - 1) * group + slices
    assert report.peak_activations[0] == pytest.approx(min(microbatches, in_flight / (chunks * slices)))
    assert loads(dumps(schedule)) == schedule


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_one_slice_is_1f1b(ranks, microbatches, chunks):
    other = {"chunks": chunks, "group_size": ranks} if chunks > 1 else {}
    whole = build("interleaved_1f1b" if chunks > 1 else "1f1b", ranks, microbatches, **other)
    sliced = build("seq1f1b", ranks, microbatches, slices=1, chunks=chunks)
    assert all(words(sliced, rank) == words(whole, rank) for rank in range(ranks))


def test_each_slice_may_take_its_own_time():
    """Attention makes later slices longer; the sum of both is the time of a micro-batch on one rank."""
    schedule = build("seq1f1b", 1, 1, slices=2)
    costs = rank_costs(schedule.header).with_times({CostPlace(Kind.FORWARD, 0, slice=1): 5.0})
    assert simulate(schedule, costs).finish == 0.5 + 5.0 + 2 * 1.0
