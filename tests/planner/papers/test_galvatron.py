"""An iteration compared with the simulator, and the whole search with brute force."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import pytest

from megapipe.planner.papers.galvatron import (
    Floats,
    Plan,
    Strategy,
    StrategyCost,
    iteration_seconds,
    search,
    stage_strategies,
)
from megapipe.schedules import build
from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import balance_layers
from megapipe.schedules.simulation.costs import rank_costs, stage_times
from megapipe.schedules.simulation.simulate import simulate


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


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 2), (4, 8)])
def test_an_iteration_of_equal_stages_is_the_simulated(stages: int, microbatches: int) -> None:
    passes = [1.0] * stages, [2.0] * stages
    for extra in ([0.0] * stages, [0.0] * (stages - 1) + [7.0], [1.0] * stages):
        assert iteration_seconds(*passes, extra, microbatches) == pytest.approx(
            simulated(*passes, extra, microbatches), rel=1e-12
        )
    seconds = iteration_seconds(*passes, [0.0] * stages, microbatches)
    assert seconds == pytest.approx(3.0 * (microbatches + stages - 1))


@pytest.mark.parametrize("seed", range(6))
def test_an_iteration_of_unequal_stages_is_the_simulated(seed: int) -> None:
    rng = random.Random(seed)
    stages, microbatches = rng.choice([2, 3, 4]), rng.choice([1, 2, 4, 8, 64])
    forward, backward, reduction = ([rng.uniform(1, 3) for _ in range(stages)] for _ in range(3))
    for extra in ([0.0] * stages, [2 * each for each in reduction]):
        assert iteration_seconds(forward, backward, extra, microbatches) == pytest.approx(
            simulated(forward, backward, extra, microbatches), rel=1e-12
        )


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
