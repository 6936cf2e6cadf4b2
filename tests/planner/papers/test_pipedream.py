"""Planners of PipeDream and 2BW (arXiv 2006.09503): brute force, walks of schedules, and findings of that paper."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.run import DataConfig, PretrainConfig, TrainingConfig
from megapipe.layout.hardware.description import hardware_device_type, load_hardware
from megapipe.layout.prediction import layout_costs
from megapipe.layout.stages import layers_of, num_parameters
from megapipe.planner.cost.step_time import step_seconds
from megapipe.planner.papers.pipedream import (
    BlockModel,
    Execution,
    Layer,
    Level,
    Machine,
    Partition,
    PartitionStage,
    configurations,
    flat,
    hierarchical,
    plan,
    sequences_per_second,
    uniform_run,
)
from megapipe.schedules.simulation.order_times import OrderCosts
from megapipe.spec.layers import layer_flops


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


Passes = Callable[[int], float]
"""Replicas of a stage -> how often its weights cross a link in a gradient sum."""


def slowest(layers: list[Layer], stages: list[tuple[int, int, int, float]], level: Level, passes: Passes) -> float:
    """The slowest stage or hand-over of stages (first, last, workers, seconds of one worker), by the paper's terms."""
    times = [2 * layers[first - 1].activation_bytes / level.bytes_per_second for first, *_ in stages[1:]]
    for first, last, workers, alone in stages:
        weights = sum(layer.weight_bytes for layer in layers[first:last])
        times.append(max(alone, passes(workers) * weights / level.bytes_per_second) / workers)
    return max(times)


def best_seconds(layers: list[Layer], first: int, last: int, levels: list[Level], passes: Passes) -> float:
    """The best of layers first to last over all of the levels, every choice tried."""
    if not levels:
        return sum(layer.seconds for layer in layers[first:last])
    *inner, level = levels
    return min(
        slowest(layers, [(*each, best_seconds(layers, *each[:2], inner, passes)) for each in stages], level, passes)
        for stages in partitions(first, last, level.width)
    )


def seconds_of(
    layers: list[Layer], stages: tuple[PartitionStage, ...], first: int, last: int, levels: list[Level], passes: Passes
) -> float:
    """The seconds of a partition, each level's stages of which are contiguous and use its whole width."""
    if not levels:
        assert not stages
        return sum(layer.seconds for layer in layers[first:last])
    *inner, level = levels
    assert [stages[0].first, stages[-1].last] == [first, last]
    assert all(one.last == other.first for one, other in pairwise(stages))
    assert sum(stage.workers for stage in stages) == level.width
    own = [
        (each.first, each.last, each.workers, seconds_of(layers, each.inner, each.first, each.last, inner, passes))
        for each in stages
    ]
    return slowest(layers, own, level, passes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num_layers", "widths"),
    [(1, (3,)), (5, (1,)), (6, (4,)), (8, (4,)), (5, (2, 3)), (5, (3, 2)), (5, (2, 2, 2))],
)
def test_the_partition_is_that_of_brute_force(seed: int, num_layers: int, widths: tuple[int, ...]) -> None:
    layers = profile(seed, num_layers)
    levels = [Level(width, 30.0 / 3**index) for index, width in enumerate(widths)]
    cases: list[tuple[Partition, Passes]] = [(hierarchical(layers, levels), lambda count: 2 * (count - 1))]
    if len(widths) == 1:
        cases.append((flat(layers, widths[0], 30.0), lambda count: 4 * (count - 1) / count))
    for partition, passes in cases:
        best = best_seconds(layers, 0, num_layers, levels, passes)
        assert partition.seconds == pytest.approx(best, rel=1e-12)
        assert seconds_of(layers, partition.stages, 0, num_layers, levels, passes) == pytest.approx(best, rel=1e-12)


def test_straight_pipelines_keep_one_mini_batch_per_stage() -> None:
    assert Partition(1.0, tuple(PartitionStage(index, index + 1, 1) for index in range(5))).in_flight == 5
    assert Partition(1.0, (PartitionStage(0, 1, 3), PartitionStage(1, 2, 4))).in_flight == 3


V100_16 = Machine(devices=64, devices_per_server=8, memory_bytes=16 * 2**30, fast=150e9, slow=25e9 / 8)
"""Eight p3.16xlarge: NVLink inside, 25 Gbit/s between."""
V100_FLOPS = 45e12
"""FLOP/s of one device in the paper."""
VERSION_BYTES, GRADIENT_BYTES = 16, 2
"""Bytes per parameter in the paper: 16-bit weight and gradient, fp32 master weight and Adam's two moments, of which it
counts two versions of everything."""


def appendix_a(weights: float, activations: float, boundary: float, depth: int, execution: Execution) -> float:
    """Bytes of one of equal stages: two versions, and as many micro-batches as stages, of which recomputation keeps
    the inputs and one whole; without pipelining one version and one micro-batch. Of the whole model but boundary."""
    if execution == "no_pipelining":
        return (weights + activations) / depth + boundary
    whole = 1 if execution == "recomputed" else depth
    return (2 * weights + whole * activations) / depth + depth * boundary


def papers_model(num_layers: int, hidden: int, heads: int) -> PretrainConfig:
    """A model of section 5, on sequences of 512 tokens."""
    model = ModelConfig(
        vocabulary_size=51200,
        max_positions=512,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        attention="unfused",
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    return uniform_run(
        PretrainConfig(model=model, data=DataConfig(sequence_length=512), training=TrainingConfig(precision="fp16")), 1
    )


def blocks_of(config: PretrainConfig) -> BlockModel:
    """The model on devices of `V100_FLOPS`, with bytes and FLOPs of its blocks as they are declared."""
    hardware, block = load_hardware("v100-16"), layers_of(config)[1]
    parameters, blocks = num_parameters(config), config.model.num_layers

    def seconds(size: int, recomputed: bool) -> float:
        flops = layer_flops(config.model, block, size, 512).total
        return flops / V100_FLOPS * (4 / 3 if recomputed else 1)

    def memory(depth: int, size: int, execution: Execution) -> float:
        costs = layout_costs(uniform_run(config, size), device=hardware_device_type(hardware))
        return appendix_a(VERSION_BYTES * parameters, blocks * costs.kept(block), costs.stream, depth, execution)

    def boundary(size: int) -> int:
        return layout_costs(uniform_run(config, size), device=hardware_device_type(hardware)).stream

    return BlockModel(blocks, seconds, boundary, memory, GRADIENT_BYTES * parameters)


@pytest.mark.parametrize("batch", [512, 2048])
@pytest.mark.parametrize(("billions", "hidden", "depth"), [(2.2, 2304, 8), (3.8, 3072, 16)])
def test_the_best_depth_is_that_of_the_paper(batch: int, billions: float, hidden: int, depth: int) -> None:
    config = papers_model(32, hidden, 32)
    assert num_parameters(config) == pytest.approx(billions * 1e9, rel=0.03)
    best = plan(blocks_of(config), V100_16, batch)
    assert (best.depth, best.width) == (depth, 64 // depth)
    assert best.accumulation * best.width * best.depth * best.micro_size == batch


def test_about_30_billion_parameters_are_the_most_that_fit() -> None:
    """One stage a device, recomputed, of one sequence."""
    layers = 2176
    while blocks_of(papers_model(layers + 64, 1024, 16)).memory_bytes(64, 1, "recomputed") <= V100_16.memory_bytes:
        layers += 64
    assert layers >= 2240  # of the 28.3 billion that the authors ran
    largest = papers_model(layers, 1024, 16)
    assert num_parameters(largest) == pytest.approx(30e9, rel=0.05)
    best = plan(blocks_of(largest), V100_16, 512)
    assert (best.width, best.depth, best.execution) == (1, 64, "recomputed")


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_that_of_brute_force(seed: int) -> None:
    """Over widths, depths, micro-batch sizes and executions, with costs per micro-batch and per sequence."""
    rng = random.Random(seed)
    fixed, each, weights, live, edge = (rng.uniform(0, 1), rng.uniform(0.1, 1), rng.uniform(20, 200), 9.0, 1.5)

    def memory(depth: int, size: int, execution: Execution) -> float:
        return appendix_a(weights, live * size, edge * size, depth, execution)

    model = BlockModel(
        12,
        lambda size, again: (fixed + each * size) * (4 / 3 if again else 1),
        lambda size: edge * size,
        memory,
        weights,
    )
    machine = Machine(12, 4, memory_bytes=rng.uniform(40, 160), fast=100, slow=rng.uniform(5, 50))
    batch, rates, space = 24, [0.0], set()
    executions: tuple[Execution, ...] = ("no_pipelining", "pipelined", "recomputed")
    for width, depth, size, execution in product(range(1, 13), range(1, 13), range(1, 25), executions):
        share = width * size * (1 if execution == "no_pipelining" else depth)
        if width * depth > 12 or 12 % depth or batch % share:
            continue
        if memory(depth, size, execution) <= machine.memory_bytes:
            rates.append(sequences_per_second(model, machine, batch, width, depth, size, execution))
            space.add((width, depth, execution))
    assert plan(model, machine, batch).sequences_per_second == pytest.approx(max(rates), rel=1e-12)
    plans = list(configurations(model, machine, batch))
    assert {(each.width, each.depth, each.execution) for each in plans} == space
    assert all(each.memory_bytes <= machine.memory_bytes for each in plans)
    assert all(each.accumulation >= 1 for each in plans if each.execution != "no_pipelining")


def test_throughput_is_the_cost_model_by_hand() -> None:
    model = BlockModel(
        4, lambda size, again: (4 / 3 if again else 1) * size, lambda size: 3.0 * size, lambda *given: 1.0, 40
    )
    machine = Machine(4, 2, memory_bytes=1e9, fast=10, slow=2)
    stage = 2 * 2.0 + 2 * (6 + 6) / 2  # two blocks of two sequences; sends over the slow link
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "pipelined") == pytest.approx(2 / stage)
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "no_pipelining") == pytest.approx(2 / (2 * stage))
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "recomputed") == pytest.approx(2 / (stage + 4 / 3))
    reduced = 2 * 1 / 2 * (40 / 2) / 2  # two replicas reach a server's two devices
    assert sequences_per_second(model, machine, 4, 2, 2, 2, "pipelined") == pytest.approx(4 / max(stage, reduced))
    assert sequences_per_second(model, machine, 4, 2, 1, 2, "pipelined") == pytest.approx(4 / max(8, 40 / 2))


@pytest.mark.parametrize(("depth", "microbatches"), [(2, 2), (4, 8), (8, 64)])
def test_throughput_is_that_of_a_walk_of_the_schedule(depth: int, microbatches: int) -> None:
    """Equal stages without messages, whose replicas have nothing to sum."""
    model = BlockModel(8, lambda size, again: 3.0 * size, lambda size: 0.0, lambda *given: 1.0, 1.0)
    machine = Machine(8, 8, memory_bytes=1.0, fast=1, slow=1)
    stage = 3.0 * 8 / depth
    none, forward, links = np.zeros((1, depth)), np.full((1, depth), stage / 3), np.zeros((1, depth, depth))
    costs = OrderCosts(none, forward, none, 2 * forward, none, none, links, links)
    ((walked,),) = step_seconds("2bw", {}, costs, microbatches)
    rate = sequences_per_second(model, machine, microbatches, 1, depth, 1, "pipelined")
    assert microbatches / walked == pytest.approx(rate, rel=1e-12)
