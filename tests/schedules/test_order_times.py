"""The walk of an order compared with the simulator of the lowered schedule, and long steps with full walks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import megapipe.planner.cost.step_time as pipeline_time
from megapipe.planner.cost.step_time import step_seconds, waiting_of
from megapipe.schedules import Costs, Link, Rows, Schedule, ScheduleError, Sections, build, lower, order, simulate
from megapipe.schedules.actions import COMPUTE_STREAM, GROUP, KIND, MICROBATCH, STAGE, Kind
from megapipe.schedules.registry import GENERATORS
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.simulation import stage_times
from megapipe.schedules.simulation.costs import TIMED
from megapipe.schedules.simulation.order_times import OrderCosts, OrderGraph
from megapipe.schedules.table import Table
from tests.schedules.support import TRAINED, fewest_microbatches

NAMES = sorted({*TRAINED} - {"seq1f1b"})
"""Times of slices are not planned."""


@st.composite
def orders(draw: st.DrawFn, name: str, longest: int = 24) -> tuple[int, int, int, dict[str, Any]]:
    """Ranks, stages of each, micro-batches, and options."""
    generator, options = GENERATORS[name], dict[str, Any]()
    ranks = draw(st.integers(2, 5))
    chunks = generator.chunks
    if "chunks" in generator.order_options:
        chunks = options["chunks"] = draw(st.integers(2, 3))
    if "group_size" in generator.order_options and draw(st.booleans()):
        options["group_size"] = draw(st.integers(1, 7))
    if generator.takes_two_bp and draw(st.integers(0, 3)) == 0:
        options |= {"two_bp": True} | draw(st.sampled_from([{}, {"max_pending": 2}]))
    count = draw(st.integers(longest // 2, longest) if longest > 24 else st.integers(1, longest))
    return ranks, chunks, max(count, fewest_microbatches(name, ranks)), options


def random_costs(seed: int, ranks: int, stages: int, layouts: int = 1) -> OrderCosts:
    """Whole numbers, so that sums are exact: of even or uneven stages, and links that may be slower than they are."""
    random = np.random.default_rng(seed)
    low, high = ((100, 101), (95, 106), (50, 150))[random.integers(3)]
    phases = [random.integers(low, high, (layouts, stages)).astype(float) for _ in range(3)]
    again = random.integers(0, 40, (layouts, stages)) * float(random.integers(2))
    links = [random.integers(0, 160, (layouts, ranks, ranks)) * float(random.integers(2)) for _ in range(2)]
    forward, half, weight = phases
    after = random.integers(0, 90, (layouts, stages)) * float(random.integers(2))
    return OrderCosts(np.zeros_like(forward), forward, again, half + weight, half, weight, *links, after)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_walks_of_orders_equal_simulations_of_schedules(name: str, data: st.DataObject, seed: int) -> None:
    ranks, chunks, count, options = data.draw(orders(name))
    stages = ranks * chunks
    costs = random_costs(seed, ranks, stages, layouts=2)._replace(after_backward=None)
    schedule = build(name, ranks, count, recompute=((range(1),),) * stages, **options)
    (seconds,) = step_seconds(name, options, costs, count)  # type: ignore[arg-type]
    for layout in range(2):
        exact = simulated(schedule, costs, layout, 1 if schedule.flushes else 4)
        if not schedule.flushes:
            exact = (exact - simulated(schedule, costs, layout, 2)) / 2
        assert seconds[layout] == pytest.approx(exact, rel=1e-12)


def simulated(schedule: Schedule, costs: OrderCosts, layout: int, steps: int) -> float:
    """When the last rank of a lowered schedule ends."""
    ranks, none = schedule.header.num_ranks, (0.0,) * len(schedule.header.stages)
    phases = costs.forward, costs.backward, costs.backward_input, costs.backward_weight, costs.before_backward
    times = dict.fromkeys(TIMED, none) | dict(
        zip(COMPUTE_STREAM, (tuple(each[layout]) for each in phases), strict=True)
    )
    links = {
        (sender, receiver): Link(costs.latency[layout, sender, receiver], costs.transfer[layout, sender, receiver])
        for sender in range(ranks)
        for receiver in range(ranks)
    }
    return simulate(schedule, Costs(stage_times(schedule.header, times), links=links), steps).finish


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted({*NAMES} - {"dualpipe_v"})), data=st.data(), seed=st.integers(0, 2**31))
def test_work_after_a_backward_delays_the_next_backward(name: str, data: st.DataObject, seed: int) -> None:
    ranks, chunks, count, options = data.draw(orders(name, 12))
    schedule, costs = order(name, ranks, count, **options), random_costs(seed, ranks, ranks * chunks)
    graph = OrderGraph(schedule, 1 if schedule.flushes else 3)
    ((finish,),) = graph.finish(graph.ends(costs), costs.after_backward)
    assert finish == pytest.approx(played(Table.unroll(schedule, 1 if schedule.flushes else 3), costs), rel=1e-12)


def played(table: Table, costs: OrderCosts) -> float:
    """When the last rank ends: rank by rank, each as far as the messages have come. No row is in a group."""
    header, stages = table.header, len(table.header.stages)
    costs = OrderCosts(*(None if each is None else each[0] for each in costs))  # type: ignore[arg-type]
    queues = [list(table.rows[table.rank == rank]) for rank in range(header.num_ranks)]
    clocks, left, busy = [0.0] * len(queues), [0.0] * len(queues), dict[tuple[int, int], float]()
    arrivals = dict[tuple[bool, int, int], float]()
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = Kind(queue[0][KIND]), int(queue[0][STAGE]), int(queue[0][MICROBATCH])
                route, forward = microbatch % len(header.routes), kind == Kind.FORWARD
                neighbors = header.preceding_stages, header.following_stages
                source, target = (int(each[route, stage]) for each in (neighbors if forward else neighbors[::-1]))
                backward = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                remote = source >= 0 and header.stage_ranks[source] != rank
                place = forward, stage, microbatch
                if (forward or backward) and remote and place not in arrivals:
                    break
                queue.pop(0)
                moved = True
                if backward:
                    clocks[rank] += left[rank] + costs.before_backward[stage]
                    left[rank] = costs.after_backward[stage]  # type: ignore[index]
                phases = costs.forward, costs.backward, costs.backward_input, costs.backward_weight
                kinds = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
                clocks[rank] = max(clocks[rank], arrivals.get(place, 0.0) if forward or backward else 0.0)
                clocks[rank] += phases[kinds.index(kind)][stage]
                to = int(header.stage_ranks[target]) if 0 <= target < stages else rank
                if (forward or backward) and to != rank:
                    link = rank, to
                    busy[link] = max(busy.get(link, 0.0), clocks[rank]) + costs.transfer[link]
                    arrivals[forward, target, microbatch] = busy[link] + costs.latency[link]
        assert moved
    return max(clock + rest for clock, rest in zip(clocks, left, strict=True))


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data(), seed=st.integers(0, 2**31))
def test_the_walk_treats_grouped_rows_as_one_action(name: str, data: st.DataObject, seed: int) -> None:
    """Neighbouring rows of an order become groups of two or three, as far as ranks do not wait for each other."""
    ranks, chunks, count, options = data.draw(orders(name, 12))
    plain, size = order(name, ranks, count, **options), data.draw(st.integers(2, 3))
    random = np.random.default_rng(seed)

    def grouped(rows: Rows) -> Rows:
        number = np.arange(len(rows)) // size
        chosen = random.random(len(rows)) < data.draw(st.sampled_from([0.0, 0.2, 1.0]))
        found = rows.copy()
        found[:, GROUP] = np.where(chosen[number], number, -1)
        return found

    sections = (tuple(map(grouped, plain.sections[part])) for part in SECTIONS)
    schedule = replace(plain, sections=Sections(*sections))
    steps = 1 if schedule.flushes else 3
    try:
        lowered = lower(schedule, recompute=((range(1),),) * (ranks * chunks), checked=True)
    except ScheduleError:
        assume(False)
    costs, graph = random_costs(seed, ranks, ranks * chunks, layouts=2), OrderGraph(schedule, steps)
    costs = costs._replace(after_backward=None)
    (found,) = graph.finish(graph.ends(costs))
    assert found == pytest.approx([simulated(lowered, costs, layout, steps) for layout in range(2)], rel=1e-12)


def test_groups_that_wait_for_each_other_are_refused() -> None:
    """Rank 0 sends micro-batch 1 when its pair has ended, which waits for the backward of it."""
    plain = order("gpipe", 2, 2)
    rows = [each.copy() for each in plain.sections.body]
    rows[0] = rows[0][[0, 1, 3, 2]]
    rows[0][1:3, GROUP] = 0
    with pytest.raises(ScheduleError, match="wait for each other in a cycle"):
        OrderGraph(replace(plain, sections=Sections.flushing(rows)))


LONG = [name for name in NAMES if name not in ("zb_auto", "v_auto")]
"""The orders of these take seconds to find, and never repeat."""


@pytest.mark.parametrize(("examples", "longest"), [(8, 120), pytest.param(300, 400, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", LONG)
def test_long_steps_take_the_time_of_full_walks(name: str, examples: int, longest: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**31))
    def check(data: st.DataObject, seed: int) -> None:
        ranks, chunks, count, options = data.draw(orders(name, longest))
        costs = random_costs(seed, ranks, ranks * chunks)
        seconds = step_seconds(name, options, costs, count)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline_time, "WALKED_PERIODS", ())
            assert seconds == pytest.approx(step_seconds(name, options, costs, count), rel=1e-12)  # type: ignore

    check()


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_a_million_micro_batches_are_not_walked_singly(name: str) -> None:
    ranks, stages = 4, 4 * GENERATORS[name].chunks
    ones = np.ones((1, stages))
    links = np.zeros((2, 1, ranks, ranks))
    costs = OrderCosts(0 * ones, ones, 0 * ones, 2 * ones, ones, ones, *links)
    few, many = (float(step_seconds(name, {}, costs, count)[0, 0]) for count in (400, 1_000_000 // stages))
    assert many - few == pytest.approx((1_000_000 // stages - 400) * 3 * stages / ranks, rel=1e-9)


@given(name=st.sampled_from(NAMES), ranks=st.integers(2, 5), count=st.integers(5, 20), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_waits_are_nonnegative_and_slower_stages_never_help(name: str, ranks: int, count: int, seed: int) -> None:
    stages, count = ranks * GENERATORS[name].chunks, max(count, fewest_microbatches(name, ranks))
    plain = random_costs(seed, ranks, stages)
    slower = plain._replace(forward=plain.forward + np.eye(stages)[seed % stages])
    work = 1.0  # far below that of any rank
    totals = []
    after = np.random.default_rng(seed).integers(0, 300, ranks).astype(float)
    if not order(name, ranks, count).flushes:  # the next step follows at once
        after *= 0
    for costs in (plain, slower):
        waiting = waiting_of(name, {}, costs, count, work, after)
        assert min(waiting) >= 0
        totals.append(sum(waiting))
    assert totals[1] >= totals[0]
