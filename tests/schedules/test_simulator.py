"""The simulator against published and hand-computed figures."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import GENERATORS, Costs, Kind, Link, ScheduleError, build, order, rank_costs, simulate
from megapipe.schedules.actions import COMPUTE_KINDS, KIND, STAGE, UNIT
from megapipe.schedules.simulation import CostPlace, stage_times
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
