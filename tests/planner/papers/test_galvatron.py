"""Galvatron's planner: the paper's strategies, the dynamic programming and the whole search against brute force, and
an iteration against the simulator."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.papers.galvatron import (
    METHODS,
    Floats,
    Plan,
    Strategy,
    StrategyCost,
    Tables,
    choose,
    iteration_seconds,
    search,
    stage_strategies,
)
from megapipe.schedules import build
from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import balance_layers
from megapipe.schedules.simulation.costs import rank_costs, stage_times
from megapipe.schedules.simulation.simulate import simulate


def strategies(devices: int, *, pruned: bool = True, recompute: bool = False) -> list[Strategy]:
    """All strategies of a machine, over every pipeline degree that is a power of 2."""
    depths = [2**power for power in range(devices.bit_length())]
    return [each for depth in depths for each in stage_strategies(devices, depth, pruned, recompute)]


@pytest.mark.parametrize(("devices", "whole", "pruned"), [(8, 34, 22), (16, 73, 37), (32, 136, 56), (64, 229, 79)])
def test_the_tree_has_the_papers_number_of_strategies(devices: int, whole: int, pruned: int) -> None:
    assert len(strategies(devices, pruned=False)) == whole
    assert len(strategies(devices)) == pruned
    assert len(strategies(devices, recompute=True)) == 2 * pruned


@pytest.mark.parametrize("devices", [1, 2, 8, 16])
def test_the_tree_has_every_nesting_of_distinct_methods_once(devices: int) -> None:
    """Found here by trying every row of up to three methods and degrees."""
    expected = set()
    degrees = [degree for degree in (2, 4, 8, 16) if degree <= devices]
    for count in range(4):
        for levels in product(product(METHODS, degrees), repeat=count):
            group = prod(degree for _, degree in levels)
            if len({method for method, _ in levels}) == count and group <= devices:
                expected.add(Strategy(devices // group, levels))
    tree = strategies(devices, pruned=False)
    assert len(tree) == len(set(tree))
    assert set(tree) == expected
    assert set(strategies(devices)) == {
        each for each in expected if not {"data", "sharded"} <= dict(each.levels).keys()
    }


def test_placement_follows_the_nesting() -> None:
    outer = Strategy(1, (("data", 2), ("tensor", 4)))
    inner = Strategy(1, (("tensor", 4), ("data", 2)))
    assert [outer.block(device) for device in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [inner.block(device) for device in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [Strategy(1, (("data", 2), ("tensor", 2), ("sharded", 2))).block(device) for device in range(8)] == [
        0, 1, 0, 1, 2, 3, 2, 3,
    ]  # fmt: skip


def fewest_seconds(tables: Tables, budget: float) -> float:
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
    expected = fewest_seconds(tables, budget)
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


@dataclass
class DrawnCosts:
    """Costs that a seed draws for every kind of layer, strategy and size of a micro-batch."""

    devices: int
    memory_bytes: float
    kinds: tuple[int, ...]
    seed: int = 0

    @cached_property
    def weights(self) -> tuple[float, ...]:
        return tuple(1.0 + kind / 4 for kind in self.kinds)

    def draw(self, *key: object) -> list[float]:
        rng = random.Random(repr((self.seed, key)))
        return [rng.uniform(1, 3) for _ in range(6)]

    def valid(self, strategy: Strategy) -> bool:
        return strategy.degree("tensor") <= 2

    def of(self, kind: int, strategy: Strategy, micro_size: int) -> StrategyCost:
        forward, backward, reduction, state, activations, working = self.draw(kind, strategy, micro_size)
        own = micro_size / strategy.replicas
        return StrategyCost(
            forward * own,
            2 * backward * own,
            3 * reduction,
            20 * state,
            activations * own,
            working * strategy.recompute,
        )

    def transitions(self, options: Sequence[Strategy], micro_size: int) -> Floats:
        return np.array([[(one != other) * self.draw(one, other)[0] for other in options] for one in options])

    def send(self, strategy: Strategy, micro_size: int) -> float:
        return self.draw("send", strategy)[0]


def simulated(forward: list[float], backward: list[float], reduction: list[float], microbatches: int) -> float:
    """The same by the schedule's own simulator, every stage's reduction after its last backward."""
    schedule = build("1f1b", len(forward), microbatches, data_parallel=True)
    totals = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.REDUCE_GRADIENTS: reduction}
    costs = rank_costs(schedule.header).with_times(stage_times(schedule.header, totals))
    return simulate(schedule, costs).finish


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("equal", [False, True])
def test_an_iteration_is_the_simulated(seed: int, equal: bool) -> None:
    rng = random.Random(seed)
    stages, microbatches = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4, 8, 64])
    forward, backward, reduction = ([rng.uniform(1, 3) for _ in range(stages)] for _ in range(3))
    if equal:
        forward, backward = [forward[0]] * stages, [backward[0]] * stages
    only_last = [0.0] * (stages - 1) + [7.0]
    for extra in ([0.0] * stages, only_last, [2 * each for each in reduction]):
        expected = simulated(forward, backward, extra, microbatches)
        assert iteration_seconds(forward, backward, extra, microbatches) == pytest.approx(expected, rel=1e-12)


def stage_costs(
    costs: DrawnCosts, cuts: Sequence[tuple[int, int]], index: int, row: Sequence[Strategy], size: int, count: int
) -> tuple[float, float, float, float]:
    """Forward, backward and reduction of a stage, and its bytes, added up layer by layer. row: of its layers."""
    first, last = cuts[index]
    own = [costs.of(kind, each, size) for kind, each in zip(costs.kinds[first:last], row, strict=True)]
    moves = sum(costs.transitions([one, other], size)[0, 1] for one, other in pairwise(row))
    sent = costs.send(row[-1], size) if index < len(cuts) - 1 else 0.0
    in_flight = min(len(cuts) - index, count)
    memory = sum(each.state + in_flight * each.activations for each in own) + max(each.working for each in own)
    backward = sum(each.backward for each in own) + moves + sent
    return sum(each.forward for each in own), backward, sum(each.reduction for each in own), memory


def brute_force(costs: DrawnCosts, batch: int) -> float:
    """Sequences per second over everything that two devices can do, stages of a pipeline by the same cut."""
    best = 0.0
    for depth, count in product((1, 2), (1, 2, 4, 8)):
        if batch % count:
            continue
        size = batch // count
        options = [each for each in stage_strategies(2, depth, recompute=True) if size % each.replicas == 0]
        cuts = balance_layers(costs.weights, depth)
        for row in product(options, repeat=len(costs.kinds)):
            stages = [
                stage_costs(costs, cuts, index, row[first:last], size, count)
                for index, (first, last) in enumerate(cuts)
            ]
            if max(each[3] for each in stages) <= costs.memory_bytes:
                forward, backward, reduction, _ = zip(*stages, strict=True)
                best = max(best, batch / iteration_seconds(forward, backward, reduction, count))
    return best


def chosen_by_stage(costs: DrawnCosts, batch_size: int) -> Plan:
    """The search's plan, whose stages' memory, added up again from their layers, is what the plan says and fits."""
    plan = search(costs, batch_size, units=4096)
    cuts = [(each.first, each.last) for each in plan.stages]
    for index, each in enumerate(plan.stages):
        size = plan.batch_size // plan.microbatches
        memory = stage_costs(costs, cuts, index, each.strategies, size, plan.microbatches)[3]
        assert each.memory_bytes == pytest.approx(memory)
        assert memory <= costs.memory_bytes
    return plan


@pytest.mark.parametrize("seed", [0, 1, 3, 8, 14, 22, 28])
def test_the_search_is_that_of_brute_force(seed: int) -> None:
    memory = random.Random(seed).uniform(70, 140)
    costs = DrawnCosts(2, memory, (0, 1, 1), seed)
    for batch_size in (4, 8):
        best = brute_force(costs, batch_size)
        if best == 0:
            with pytest.raises(ValueError, match="no strategy of 2 devices fits"):
                search(costs, batch_size)
        else:
            plan = chosen_by_stage(costs, batch_size)
            assert plan.sequences_per_second == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("budget", [90.0, 200.0])
def test_plans_of_four_devices_stay_within_memory(budget: float) -> None:
    chosen_by_stage(DrawnCosts(4, budget, (0, 1, 1, 2)), 4)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="no strategy of 4 devices fits 10 bytes per device at a batch of 4"):
        search(DrawnCosts(4, 10.0, (0, 0)), 4)
    with pytest.raises(ValueError, match="devices must be a power of 2, got 3"):
        search(DrawnCosts(3, 1.0, (0,)), 4)
