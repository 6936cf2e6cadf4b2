"""Simulators of ranks with and without machines of their own, against published and hand-computed figures."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import (
    GENERATORS,
    Costs,
    Kind,
    Link,
    Schedule,
    ScheduleError,
    build,
    order,
    rank_costs,
    simulate,
)
from megapipe.schedules.actions import COMPUTE_KINDS, COMPUTE_STREAM, KIND, STAGE, UNIT
from megapipe.schedules.simulation import CostPlace, stage_times
from megapipe.schedules.simulation.contended import simulate_contended
from megapipe.schedules.simulation.costs import TIMED
from megapipe.schedules.states import StateTable, StateUnit
from tests.schedules.support import TRAINED, schedules


def simulated(name, ranks, microbatches, steps=1, **costs):
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, rank_costs(schedule.header, **costs), steps)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_bubble_is_ranks_minus_one_over_microbatches(name, ranks, microbatches, forward, backward):
    run = simulated(name, ranks, microbatches, forward=forward, backward=backward)
    assert run.finish == (microbatches + ranks - 1) * (forward + backward)
    assert run.ideal == microbatches * (forward + backward)
    assert run.bubble == pytest.approx((ranks - 1) / microbatches, abs=1e-12)
    assert run.bubble_rate == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
    in_flight = range(ranks, 0, -1) if name == "1f1b" else [microbatches] * ranks
    assert run.peak_activations == tuple(min(microbatches, each) for each in in_flight)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.floats(0, 2), st.floats(0, 2), st.booleans(), st.integers(1, 3))
def test_no_run_beats_its_bounds(schedule, latency, transfer, blocking, steps):
    costs = rank_costs(
        schedule.header, forward=1.0, backward=2.0, update=0.25, reduce_gradients=0.5, reduce_scalars=0.125,
        link=Link(latency, transfer), blocking_sends=blocking,
    )  # fmt: skip
    run = simulate(schedule, costs, steps)
    ranks = [schedule.rank_of(stage) for stage in schedule.header.routes[0]]
    hops = 2 * sum(here != there for here, there in pairwise(ranks))
    split = run.table.is_kind(Kind.BACKWARD_INPUT).any()
    slices = schedule.header.slices
    chain = (2 if split else 3) * schedule.header.num_ranks / slices + hops * (latency + transfer / slices)
    assert run.finish >= run.ideal - 1e-9
    assert run.finish >= (steps if schedule.flushes else 1) * chain - 1e-9
    path = run.critical_path()
    assert run.end[path[-1]] == run.finish
    assert run.start[path[0]] == 0.0
    for before, after in pairwise(path):
        assert run.start[after] >= run.start[before]
    for first, last in zip(run.table.offsets, run.table.offsets[1:], strict=False):
        compute = run.table.is_kind(*COMPUTE_KINDS, Kind.UPDATE)[first:last]
        starts, ends = run.start[first:last][compute], run.end[first:last][compute]
        assert (starts[1:] >= ends[:-1] - 1e-12).all()


def test_blocking_sends_block_the_sender():
    free, blocked = (
        simulated("1f1b", 2, 4, link=Link(latency=0.5), blocking_sends=blocking).finish for blocking in (False, True)
    )
    assert blocked > free


def test_reductions_overlap_backwards_and_updates_wait_for_ranks():
    schedule = build("gpipe", 2, 1, units_per_stage=[2, 2], data_parallel=True)
    run = simulate(schedule, rank_costs(schedule.header, reduce_gradients=2.0, reduce_scalars=0.5, update=1.0))
    # rank 1: backward units 2-3-4, reductions 3-4 and 4-5; rank 0: backward units 4-5-6, reductions 5-6 and 6-7.
    updates = run.table.rows_with(Kind.UPDATE)
    assert set(run.start[updates]) == {7.5, 8.0}
    assert run.finish == 8.5


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ScheduleError, match="lower it"):
        simulate(order("gpipe", 2, 2), rank_costs(order("gpipe", 2, 2).header))
    header = build("gpipe", 2, 2).header
    with pytest.raises(ScheduleError, match="both halves"):
        rank_costs(header, backward_input=1.0)
    with pytest.raises(ScheduleError, match="times must be at least 0"):
        rank_costs(header, forward=-1.0)


def test_units_take_own_times_or_shares_by_size():
    """A stage's gathers take 4: 1 and 3 by size, unless a unit's own time is given."""
    units = (StateUnit(0, "sharded"), StateUnit(0, "sharded", size=3))
    states = StateTable((units,), weight_pool=4)
    schedule = build("gpipe", 1, 1, units_per_stage=[1], data_parallel=True, states=states)
    costs = rank_costs(schedule.header, gather_weights=4.0, update=2.0)
    for own, gathers, updates in (
        ({}, [1.0, 3.0], [1.0, 1.0]),
        ({CostPlace(Kind.GATHER_WEIGHTS, 0, 1): 7.0, CostPlace(Kind.UPDATE, 0, 0): 0.5}, [1.0, 7.0], [0.5, 1.0]),
    ):
        run = simulate(schedule, costs.with_times(own))
        assert run.durations[run.table.rows_with(Kind.GATHER_WEIGHTS)].tolist() == gathers
        assert run.durations[run.table.rows_with(Kind.UPDATE)].tolist() == updates


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(TRAINED), data=st.data())
def test_every_row_takes_its_units_time(name: str, data: st.DataObject) -> None:
    """Stages of different layers, some of them dense and experts; a stage's updates take the sum of its units'."""
    stages = 2 * GENERATORS[name].chunks
    layers = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=2)
    units = tuple(
        tuple(StateUnit(layer, "sharded", True, size) for layer in range(count) for size in data.draw(sizes))
        for count in layers
    )
    states = StateTable(units, weight_pool=36, gradient_pool=18)
    schedule = build(name, 2, 4, units_per_stage=layers, data_parallel=True, states=states)
    random = data.draw(st.randoms(use_true_random=False))
    places = stage_times(schedule.header, dict.fromkeys(TIMED, (1.0,) * stages))
    costs = Costs({place: random.uniform(0.5, 2.0) for place in places})
    run = simulate(schedule, costs, steps := 1 if schedule.flushes else 2)
    table = run.table
    columns = (table.kind, table.stage, table.unit)
    for row, place in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        assert run.durations[row] == (costs.times[CostPlace(*place)] if place[0] in TIMED else 0.0)
    updates = table.rows_with(Kind.UPDATE)
    for stage, own in enumerate(units):
        expected = sum(costs.times[CostPlace(Kind.UPDATE, stage, unit)] for unit in range(len(own)))
        took = float(run.durations[updates[table.stage[updates] == stage]].sum())
        assert took == pytest.approx(expected * steps * schedule.header.updates_per_step)
    row = table.rows[data.draw(st.sampled_from(table.rows_with(*TIMED).tolist()))]
    missing = CostPlace(Kind(row[KIND]), int(row[STAGE]), int(row[UNIT]))
    with pytest.raises(ScheduleError, match=f"no time of {missing.kind.name} for unit {missing.unit}"):
        simulate(schedule, Costs({place: time for place, time in costs.times.items() if place != missing}), steps)


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
