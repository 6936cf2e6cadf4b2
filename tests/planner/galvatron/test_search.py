"""Costs by hand, the slow-down's properties, and the whole search beside brute force."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.galvatron.costs import EqualDevices, LayerProfile, StrategyCosts, overlapped
from megapipe.planner.galvatron.search import Plan, iteration_seconds, search
from megapipe.planner.galvatron.strategies import Strategy, stage_strategies
from megapipe.schedules import build
from megapipe.schedules.balance import balance_layers
from megapipe.schedules.simulation.costs import rank_costs
from megapipe.schedules.simulation.simulate import simulate

LAYER = LayerProfile(forward_seconds=1.0, weight_bytes=80.0, activation_bytes=10.0, boundary_bytes=2.0)
MACHINE = EqualDevices(devices=4, devices_per_node=2, memory_bytes=1e9, fast=40.0, slow=10.0)
seconds = st.floats(0, 1e3)


@settings(max_examples=40)
@given(compute=seconds, communication=seconds, more=seconds, slow_down=st.floats(1, 2))
def test_overlap_is_monotone_and_between_side_by_side_and_in_turn(
    compute: float, communication: float, more: float, slow_down: float
) -> None:
    both = overlapped(compute, communication, slow_down)
    slack = 1e-9 * (1 + both)
    assert max(compute, communication) - slack <= both <= compute + communication + slack
    assert overlapped(compute + more, communication, slow_down) >= both - slack
    assert overlapped(compute, communication + more, slow_down) >= both - slack


@settings(max_examples=40)
@given(compute=st.floats(0.1, 100), step=st.floats(1e-9, 1e-3), slow_down=st.floats(1, 2))
def test_overlap_is_continuous_where_the_longer_side_changes(compute: float, step: float, slow_down: float) -> None:
    before, after = (overlapped(compute, compute + each, slow_down) for each in (-step, step))
    assert abs(after - before) <= 2 * slow_down * step + 1e-9
    assert overlapped(compute, compute, slow_down) == pytest.approx(slow_down * compute)


def test_overlap_runs_the_rest_of_the_longer_side_at_full_speed() -> None:
    assert overlapped(3.0, 1.0, 1.3) == pytest.approx(1.3 + 2.0)
    assert overlapped(1.0, 3.0, 1.3) == pytest.approx(1.3 + 2.0)
    assert overlapped(2.0, 0.0, 1.3) == 2.0


def stage(strategy: Strategy, micro_size: int = 8) -> StrategyCosts:
    return StrategyCosts(MACHINE, (LAYER,), (strategy,), micro_size, in_flight=3, microbatches=1, last=True)


def test_costs_of_a_layer_by_hand() -> None:
    data = Strategy(1, (("data", 4),))
    assert stage(data).steady_seconds(LAYER, data) == 2 * 3
    reduction = 2 * 3 / 4 * 80 / 10
    assert stage(data).extra_seconds(LAYER, data) == pytest.approx(overlapped(4, reduction, 1.3) - 4)
    assert stage(data).memory(LAYER, data) == (4 * 80 + 3 * 2 * 10, 0)

    sharded = Strategy(1, (("sharded", 4),), recompute=True)
    assert stage(sharded).steady_seconds(LAYER, sharded) == pytest.approx(2 * 4 + 2 * 3 / 4 * 80 / 10)
    assert stage(sharded).memory(LAYER, sharded) == (4 * 80 / 4 + 3 * 2 * 2, 2 * 10 + 2 * 80)

    both = Strategy(1, (("data", 2), ("tensor", 2)))
    gathered = 6 / 2 * 2 * 4 / 40
    assert stage(both).steady_seconds(LAYER, both) == pytest.approx(4 * 3 / 2 + gathered)
    assert stage(both).extra_seconds(LAYER, both) == pytest.approx(overlapped(4, 40 / 10, 1.3) - 4)
    assert stage(both).memory(LAYER, both) == (4 * 80 / 2 + 3 * 4 * (2 + 4), 0)
    again = Strategy(1, (("data", 2), ("tensor", 2)), recompute=True)
    assert stage(again).steady_seconds(LAYER, again) == pytest.approx(4 * 4 / 2 + 1.5 * gathered)
    assert stage(again).memory(LAYER, again) == (4 * 80 / 2 + 3 * 4 * 2, 4 * (2 + 4))
    assert stage(data, micro_size=6).steady_seconds(LAYER, data) == float("inf")


def test_a_stage_that_is_not_the_last_sends_its_output_and_takes_its_gradient() -> None:
    options = (Strategy(2, (("data", 2),)), Strategy(2, (("tensor", 2),)))
    last = StrategyCosts(MACHINE, (LAYER, LAYER), options, 8, in_flight=1, microbatches=2, last=True).tables()
    first = StrategyCosts(MACHINE, (LAYER, LAYER), options, 8, in_flight=1, microbatches=2, last=False).tables()
    sent = first.seconds - last.seconds
    assert sent[0].tolist() == [0, 0]
    assert sent[1].tolist() == pytest.approx([2 * 2 * 4 / 10, 2 * 2 * 8 / 10])


def test_a_transition_moves_what_a_device_lacks_both_ways() -> None:
    data, tensor = Strategy(1, (("data", 4),)), Strategy(1, (("tensor", 4),))
    sharded = Strategy(1, (("sharded", 4),))
    outer, inner = Strategy(1, (("data", 2), ("tensor", 2))), Strategy(1, (("tensor", 2), ("data", 2)))
    costs = stage(data)
    assert costs.transition_seconds(data, sharded) == 0
    assert costs.transition_seconds(tensor, tensor) == 0
    whole = 8 * 2 / 10  # the micro-batch's boundary over the slow link
    assert costs.transition_seconds(data, tensor) == costs.transition_seconds(tensor, data)
    assert costs.transition_seconds(data, tensor) == pytest.approx(0.75 * whole)
    assert costs.transition_seconds(outer, data) == pytest.approx(0.25 * whole)
    assert costs.transition_seconds(outer, inner) == pytest.approx(whole)


def simulated(steady: list[float], extra: list[float], microbatches: int) -> float:
    """The same by the schedule's own simulator, every stage's reduction behind its last backward."""
    schedule = build("1f1b", len(steady), microbatches, data_parallel=True)
    costs = replace(
        rank_costs(schedule.header),
        forward=tuple(each / 3 for each in steady),
        backward=tuple(each * 2 / 3 for each in steady),
        reduce_gradients=tuple(extra),
    )
    return simulate(schedule, costs).finish


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 2), (4, 8)])
def test_an_iteration_of_equal_stages_is_the_simulated(stages: int, microbatches: int) -> None:
    steady = [3.0] * stages
    for extra in ([0.0] * stages, [0.0] * (stages - 1) + [7.0], [1.0] * stages):
        found = iteration_seconds(steady, extra, microbatches)
        assert found == pytest.approx(simulated(steady, extra, microbatches))
    assert iteration_seconds(steady, [0.0] * stages, microbatches) == pytest.approx(3.0 * (microbatches + stages - 1))


@pytest.mark.parametrize("seed", range(12))
def test_an_iteration_of_unequal_stages_is_about_the_simulated(seed: int) -> None:
    rng = random.Random(seed)
    stages, microbatches = rng.choice([2, 3, 4]), rng.choice([1, 2, 4, 8])
    steady = [rng.uniform(1, 3) for _ in range(stages)]
    time = simulated(steady, [0.0] * stages, microbatches)
    assert time / 1.06 <= iteration_seconds(steady, [0.0] * stages, microbatches) <= time * (1 + 1e-9)
    extra = [rng.uniform(0, 6) for _ in range(stages)]
    assert iteration_seconds(steady, extra, microbatches) == pytest.approx(
        simulated(steady, extra, microbatches), rel=0.1
    )


def brute_force(layers: list[LayerProfile], machine: EqualDevices, batch_sizes: tuple[int, ...]) -> float:
    """Sequences per second over everything that two devices can do, stages of a pipeline by the same cut."""
    best = 0.0
    for batch, depth, microbatches in product(batch_sizes, (1, 2), (1, 2, 4)):
        options = stage_strategies(2, depth, recompute=True)
        cuts = balance_layers([layer.forward_seconds for layer in layers], depth)
        for row in product(options, repeat=len(layers)):
            steady, extra, fits = [], [], True
            for index, (first, last) in enumerate(cuts):
                costs = StrategyCosts(
                    machine, tuple(layers[first:last]), row[first:last], batch // microbatches,
                    min(depth - index, microbatches), microbatches, index == depth - 1,
                )  # fmt: skip
                own = list(zip(layers[first:last], row[first:last], strict=True))
                memory = [costs.memory(*each) for each in own]
                fits &= sum(kept for kept, _ in memory) + max(work for _, work in memory) <= machine.memory_bytes
                moves = sum(costs.transition_seconds(*row[at : at + 2]) for at in range(first, last - 1))
                sent = (
                    0 if costs.last else 2 * layers[last - 1].boundary_bytes * costs.micro_size / machine.bandwidth(2)
                )
                steady.append(sum(costs.steady_seconds(*each) for each in own) + moves + sent)
                extra.append(sum(costs.extra_seconds(*each) for each in own))
            if fits:
                best = max(best, batch / iteration_seconds(steady, extra, microbatches))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    layers = [
        LayerProfile(rng.uniform(1, 3), rng.uniform(5, 30), rng.uniform(9, 30), rng.uniform(1, 9)) for _ in range(3)
    ]
    machine = EqualDevices(2, 2, memory_bytes=rng.uniform(130, 450), fast=rng.uniform(5, 50), slow=5.0)
    plan = search(layers, machine, (4, 8), units=4096)
    assert plan.sequences_per_second == pytest.approx(brute_force(layers, machine, (4, 8)), rel=1e-9)
    within(plan, layers, machine)


def within(plan: Plan, layers: list[LayerProfile], machine: EqualDevices) -> None:
    """Every stage's memory, added up again from its layers, is what the plan says and fits."""
    depth = len(plan.stages)
    for index, each in enumerate(plan.stages):
        own = tuple(layers[each.first : each.last])
        size, in_flight = plan.batch_size // plan.microbatches, min(depth - index, plan.microbatches)
        costs = StrategyCosts(machine, own, each.strategies, size, in_flight, plan.microbatches, index == depth - 1)
        memory = [costs.memory(*pair) for pair in zip(own, each.strategies, strict=True)]
        total = sum(kept for kept, _ in memory) + max(working for _, working in memory)
        assert each.memory_bytes == pytest.approx(total)
        assert total <= machine.memory_bytes


@pytest.mark.parametrize("budget", [150.0, 400.0])
def test_plans_of_four_devices_stay_within_memory(budget: float) -> None:
    layers = [LayerProfile(1.0 + index / 4, 30.0, 12.0, 3.0) for index in range(4)]
    machine = EqualDevices(4, 2, budget, fast=40.0, slow=10.0)
    within(search(layers, machine, (4, 8, 16), units=64), layers, machine)


def test_what_cannot_be_is_refused() -> None:
    small = EqualDevices(4, 2, 100.0, fast=40.0, slow=10.0)
    with pytest.raises(ValueError, match="no strategy of 4 devices fits 100 bytes per device at a batch of 4"):
        search([LAYER] * 2, small, [8, 4])
    with pytest.raises(ValueError, match="layers is empty; name at least one layer"):
        search([], small, [4])
    with pytest.raises(ValueError, match="devices must be a power of 2, got 3"):
        search([LAYER], EqualDevices(3, 1, 1.0, 1.0, 1.0), [4])
    with pytest.raises(ValueError, match=r"slow_down must be at least 1, got 0\.5"):
        EqualDevices(2, 1, 1.0, 1.0, 1.0, slow_down=0.5)
    with pytest.raises(ValueError, match=r"boundary_bytes must be at most activation_bytes, got 3\.0 of 2\.0"):
        LayerProfile(1.0, 1.0, 2.0, 3.0)
