"""Ranks that share a machine: against the simulator of ranks that do not, and against what work there is at all."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Link, Schedule, ScheduleError, build, order, rank_costs, simulate
from megapipe.schedules.actions import COMPUTE_STREAM, Kind
from megapipe.schedules.simulation.contended import simulate_contended

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "2bw", "pipedream")


def schedule_of(name: str, ranks: int, count: int, **options: Any) -> Schedule:
    stages = ranks * (2 if name in ("interleaved_1f1b", "zb_v") else 1)
    return build(name, ranks, count, units_per_stage=[2] * stages, tied_groups=[(0, stages - 1)], **options)


def alone(busy: float) -> float:
    return 1.0


def cores(number: float):  # type: ignore[no-untyped-def]
    return lambda busy: max(1.0, busy / number)


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 3),
    data_parallel=st.booleans(),
    times=st.lists(st.floats(0.1, 2.0), min_size=6, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_independent_ranks_are_simulated_as_without_contention(
    name: str, ranks: int, rounds: int, data_parallel: bool, times: list[float]
) -> None:
    schedule = schedule_of(name, ranks, ranks * rounds, data_parallel=data_parallel)
    forward, to_input, to_weight, update, reduction, message = times
    costs = rank_costs(
        schedule.header, forward=forward, backward_input=to_input, backward_weight=to_weight, update=update,
        reduce_gradients=reduction, reduce_scalars=0.1, link=Link(message / 10, message / 20),
    )  # fmt: skip
    costs = replace(costs, reduce_tied=0.3)
    expected = simulate(schedule, costs, 2)
    simulation = simulate_contended(schedule, costs, alone, steps=2)
    work = expected.table.is_kind(*COMPUTE_STREAM, Kind.UPDATE)
    assert simulation.start[work] == pytest.approx(expected.start[work])
    assert simulation.end[work] == pytest.approx(expected.end[work])
    assert (simulation.start <= simulation.end).all()
    if name != "pipedream":  # no action awaits its last sum of scalars, so it has no end there
        assert simulation.finish == pytest.approx(expected.finish)


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 4),
    processes=st.integers(1, 3),
    times=st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_one_core_is_never_idle(name: str, ranks: int, processes: int, times: list[float]) -> None:
    """Someone can always go on where messages take no time, so the last rank ends when the work is done."""
    schedule = schedule_of(name, ranks, 2 * ranks)
    forward, to_input, to_weight = times
    costs = rank_costs(schedule.header, forward=forward, backward_input=to_input, backward_weight=to_weight)
    simulation = simulate_contended(schedule, costs, cores(1), processes=processes)
    assert simulation.finish == pytest.approx(processes * float(simulation.durations.sum()))


@given(name=st.sampled_from(NAMES), ranks=st.integers(2, 4), number=st.floats(1.0, 4.0))
@settings(max_examples=30, deadline=None)
def test_fewer_cores_never_help_and_cores_run_one_action(name: str, ranks: int, number: float) -> None:
    schedule = schedule_of(name, ranks, 2 * ranks)
    costs = rank_costs(schedule.header, forward=1.0, update=0.5)
    free, contended = simulate(schedule, costs), simulate_contended(schedule, costs, cores(number))
    total = float(contended.durations.sum())
    assert max(free.finish, total / number) <= contended.finish * (1 + 1e-9)
    assert contended.finish <= free.finish * max(1.0, ranks / number) * (1 + 1e-9)


def test_two_stages_on_one_core_take_turns() -> None:
    """By hand: stage 0 alone, then both forwards at half speed, and so on: 8 units of work, one core."""
    schedule = build("gpipe", 2, 2, units_per_stage=[1, 1], tied_groups=[])
    costs = rank_costs(schedule.header, forward=1.0, backward=1.0)
    simulation = simulate_contended(schedule, costs, cores(1))
    forwards = simulation.table.rows_with(Kind.FORWARD)
    assert simulation.end[forwards].tolist() == pytest.approx([1.0, 3.0, 3.0, 4.0])
    assert simulation.finish == pytest.approx(8.0)


def test_overlapped_sums_slow_compute_down_by_their_share() -> None:
    """One rank, one core, a sum of 1 that overlaps the next action: with no share it costs its own time alone."""
    schedule = build("gpipe", 1, 2, units_per_stage=[4], tied_groups=[], data_parallel=True)
    costs = rank_costs(schedule.header, forward=1.0, backward=2.0, reduce_gradients=0.4)
    free = simulate(schedule, costs).finish
    finishes = [simulate_contended(schedule, costs, cores(1), traffic_share=share).finish for share in (0.0, 0.5, 1.0)]
    assert finishes[0] == pytest.approx(free)
    assert finishes[0] < finishes[1] < finishes[2] <= free + 0.4


def test_rows_have_causes_that_ended_before_they_began() -> None:
    schedule = schedule_of("1f1b", 3, 6)
    simulation = simulate_contended(schedule, rank_costs(schedule.header), cores(2))
    rows = np.flatnonzero(simulation.cause >= 0)
    assert (simulation.end[simulation.cause[rows]] <= simulation.start[rows] + 1e-9).all()
    assert simulation.critical_path()[-1] == int(np.argmax(np.where(simulation.working, simulation.end, -np.inf)))


def test_unsupported_schedules_are_refused() -> None:
    schedule = schedule_of("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="blocking sends"):
        simulate_contended(schedule, rank_costs(schedule.header, blocking_sends=True), alone)
    bare = order("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="lower it"):
        simulate_contended(bare, rank_costs(bare.header), alone)
