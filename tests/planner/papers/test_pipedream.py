"""PipeDream's partitioners compared with brute force over all cuts and numbers of workers."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from megapipe.planner.cost.step_time import step_seconds
from megapipe.planner.papers.pipedream import Layer, Level, Partition, PartitionStage, flat, hierarchical
from megapipe.schedules.simulation.order_times import OrderCosts


def profile(seed: int, num_layers: int) -> list[Layer]:
    rng = random.Random(seed)
    return [
        Layer(rng.uniform(1, 9), rng.uniform(0, 20), rng.choice([0, rng.uniform(0, 60)])) for _ in range(num_layers)
    ]


def partitions(first: int, last: int, workers: int) -> Iterator[list[tuple[int, int, int]]]:
    """All runs of stages (first, last, workers) that use all workers."""
    for stages in range(1, min(last - first, workers) + 1):
        for cuts in combinations(range(first + 1, last), stages - 1):
            for shares in combinations(range(1, workers), stages - 1):
                edges = list(pairwise((first, *cuts, last)))
                counts = [high - low for low, high in pairwise((0, *shares, workers))]
                yield [(*edge, count) for edge, count in zip(edges, counts, strict=True)]


def flat_seconds(layers: list[Layer], stages: list[tuple[int, int, int]], bandwidth: float) -> float:
    """The slowest stage or hand-over, by the paper's terms layer by layer."""
    times = [2 * layers[first - 1].activation_bytes / bandwidth for first, _, _ in stages[1:]]
    for first, last, workers in stages:
        own = layers[first:last]
        weights = sum(4 * (workers - 1) * layer.weight_bytes / (workers * bandwidth) for layer in own)
        times.append(max(sum(layer.seconds for layer in own), weights) / workers)
    return max(times)


def nested_seconds(layers: list[Layer], first: int, last: int, levels: list[Level]) -> float:
    """The best of layers first to last over all of the levels, every choice tried."""
    if not levels:
        return sum(layer.seconds for layer in layers[first:last])
    *inner, level = levels
    best = float("inf")
    for stages in partitions(first, last, level.width):
        times = [2 * layers[start - 1].activation_bytes / level.bytes_per_second for start, _, _ in stages[1:]]
        for start, stop, workers in stages:
            weights = sum(layer.weight_bytes for layer in layers[start:stop])
            exchanged = 2 * (workers - 1) * weights / level.bytes_per_second
            times.append(max(nested_seconds(layers, start, stop, inner), exchanged) / workers)
        best = min(best, max(times))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_layers", "workers"), [(1, 3), (5, 1), (6, 4), (8, 4)])
def test_the_flat_partition_is_that_of_brute_force(seed: int, num_layers: int, workers: int) -> None:
    layers, bandwidth = profile(seed, num_layers), 10.0
    partition = flat(layers, workers, bandwidth)
    best = min(flat_seconds(layers, stages, bandwidth) for stages in partitions(0, num_layers, workers))
    assert partition.seconds == pytest.approx(best, rel=1e-12)
    own = [(stage.first, stage.last, stage.workers) for stage in partition.stages]
    assert flat_seconds(layers, own, bandwidth) == pytest.approx(best, rel=1e-12)
    assert sum(stage.workers for stage in partition.stages) == workers


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("widths", [(4,), (2, 3), (3, 2), (2, 2, 2)])
def test_the_hierarchical_partition_is_that_of_brute_force(seed: int, widths: tuple[int, ...]) -> None:
    layers = profile(seed, 5)
    levels = [Level(width, 30.0 / 3**index) for index, width in enumerate(widths)]
    partition = hierarchical(layers, levels)
    assert partition.seconds == pytest.approx(nested_seconds(layers, 0, len(layers), levels), rel=1e-12)
    check_nested(partition.stages, 0, len(layers), list(widths))


def check_nested(stages: tuple[PartitionStage, ...], first: int, last: int, widths: list[int]) -> None:
    """Each level's stages are contiguous and use its whole width."""
    if not widths:
        assert not stages
        return
    *inner, width = widths
    assert [stages[0].first, stages[-1].last] == [first, last]
    assert all(one.last == other.first for one, other in pairwise(stages))
    assert sum(stage.workers for stage in stages) == width
    for stage in stages:
        check_nested(stage.inner, stage.first, stage.last, inner)


def test_weightless_compute_is_replicated_and_heavy_weights_are_isolated() -> None:
    """VGG16's "7-1": convolutions on seven workers, the fully connected layers on one."""
    convolutions = [Layer(7.0, 0.1, 0.0) for _ in range(4)]
    connected = Layer(4.0, 0.1, 500.0)
    partition = flat([*convolutions, connected], 8, 10.0)
    assert [(stage.first, stage.last, stage.workers) for stage in partition.stages] == [(0, 4, 7), (4, 5, 1)]
    assert partition.seconds == 4.0
    assert partition.in_flight == 2


def test_straight_pipelines_keep_one_mini_batch_per_stage() -> None:
    assert Partition(1.0, tuple(PartitionStage(index, index + 1, 1) for index in range(5))).in_flight == 5
    assert Partition(1.0, (PartitionStage(0, 1, 3), PartitionStage(1, 2, 4))).in_flight == 3


@pytest.mark.parametrize("seed", range(4))
def test_straight_pipeline_seconds_equal_the_schedules_walk(seed: int) -> None:
    """Seconds are those of a mini-batch in a full pipeline, where transfers take no time."""
    layers = [Layer(each.seconds, 0.0, 1e9) for each in profile(seed, 5)]
    partition = flat(layers, 5, 1.0)
    times = np.array([[sum(layer.seconds for layer in layers[each.first : each.last]) for each in partition.stages]])
    none, links = np.zeros_like(times), np.zeros((1, times.size, times.size))
    costs = OrderCosts(none, times / 3, none, times * 2 / 3, none, none, links, links)
    ((walked,),) = step_seconds("pipedream", {}, costs, 64)
    assert [each.workers for each in partition.stages] == [1] * 5
    assert walked / 64 == pytest.approx(partition.seconds, rel=1e-9)
