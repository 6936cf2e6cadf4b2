"""The 2BW planner beside the paper's findings (arXiv 2006.09503), appendix A by hand, and brute force."""

import random
from itertools import product

import pytest

from megapipe.planner.pipedream.memory import Execution, Footprint, stage_bytes
from megapipe.planner.pipedream.transformer import TransformerShape, largest_that_fits
from megapipe.planner.pipedream.two_buffered import BlockModel, Machine, configurations, plan, sequences_per_second

V100_16 = Machine(devices=64, devices_per_server=8, memory_bytes=16 * 2**30, fast=150e9, slow=25e9 / 8)
"""Eight p3.16xlarge: NVLink inside, 25 Gbit/s between."""
V100_FLOPS = 45e12
"""What the paper reports of one device."""


def test_memory_is_that_of_appendix_a() -> None:
    footprint, depth = Footprint(weights=800, activations=160, boundary=3), 8
    assert stage_bytes(footprint, depth) == 2 * 100 + 160 + 8 * 3
    assert stage_bytes(footprint, depth, "recomputed") == 2 * 100 + 20 + 8 * 3
    assert stage_bytes(footprint, depth, "no_pipelining") == 100 + 20 + 3


@pytest.mark.parametrize("batch", [512, 2048])
@pytest.mark.parametrize(("billions", "hidden", "depth"), [(2.2, 2304, 8), (3.8, 3072, 16)])
def test_the_best_depth_is_that_of_the_paper(batch: int, billions: float, hidden: int, depth: int) -> None:
    shape = TransformerShape(32, hidden, 32)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.03)
    best = plan(shape.blocks(V100_FLOPS), V100_16, batch)
    assert (best.depth, best.width) == (depth, 64 // depth)
    assert best.accumulation * best.width * best.depth * best.micro_size == batch


def test_about_30_billion_parameters_are_the_most_that_fit() -> None:
    largest = largest_that_fits(TransformerShape(1, 1024, 16), V100_16)
    assert largest.parameters == pytest.approx(30e9, rel=0.05)
    assert largest.num_layers >= 2240  # of the 28.3 billion that the authors ran
    best = plan(largest.blocks(V100_FLOPS), V100_16, 512)
    assert (best.width, best.depth, best.execution) == (1, 64, "recomputed")


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_that_of_brute_force(seed: int) -> None:
    """Over widths, depths, micro-batch sizes and executions, with a cost per micro-batch beside that per sequence."""
    rng = random.Random(seed)
    fixed, each, weights, live, edge = (rng.uniform(0, 1), rng.uniform(0.1, 1), rng.uniform(20, 200), 9.0, 1.5)
    model = BlockModel(
        12, lambda size: fixed + each * size, lambda size: Footprint(weights, live * size, edge * size), weights
    )
    machine = Machine(12, 4, memory_bytes=rng.uniform(40, 160), fast=100, slow=rng.uniform(5, 50))
    batch, rates, space = 24, [0.0], set()
    executions: tuple[Execution, ...] = ("no_pipelining", "pipelined", "recomputed")
    for width, depth, size, execution in product(range(1, 13), range(1, 13), range(1, 25), executions):
        share = width * size * (1 if execution == "no_pipelining" else depth)
        if width * depth > 12 or 12 % depth or batch % share:
            continue
        if stage_bytes(model.footprint(size), depth, execution) <= machine.memory_bytes:
            rates.append(sequences_per_second(model, machine, batch, width, depth, size, execution))
            space.add((width, depth, execution))
    assert plan(model, machine, batch).sequences_per_second == pytest.approx(max(rates), rel=1e-12)
    found = list(configurations(model, machine, batch))
    assert {(each.width, each.depth, each.execution) for each in found} == space
    assert all(each.memory_bytes <= machine.memory_bytes for each in found)
    assert all(each.microbatches >= each.depth for each in found if each.execution != "no_pipelining")


def test_throughput_is_the_cost_model_by_hand() -> None:
    model = BlockModel(4, lambda size: 1.0 * size, lambda size: Footprint(40, 8 * size, 3.0 * size), weight_bytes=40)
    machine = Machine(4, 2, memory_bytes=1e9, fast=10, slow=2)
    stage = 2 * 2.0 + 2 * (6 + 6) / 2  # two blocks of two sequences; sends over the slow link
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "pipelined") == pytest.approx(2 / stage)
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "no_pipelining") == pytest.approx(2 / (2 * stage))
    assert sequences_per_second(model, machine, 64, 1, 2, 2, "recomputed") == pytest.approx(2 / (stage + 4 / 3))
    reduced = 2 * 1 / 2 * (40 / 2) / 2  # two replicas reach a server's two devices
    assert sequences_per_second(model, machine, 4, 2, 2, 2, "pipelined") == pytest.approx(4 / max(stage, reduced))
    assert sequences_per_second(model, machine, 4, 2, 1, 2, "pipelined") == pytest.approx(4 / max(8, 40 / 2))


def test_what_cannot_be_is_refused() -> None:
    small = Machine(2, 2, memory_bytes=1e6, fast=1, slow=1)
    with pytest.raises(ValueError, match=r"no width and depth of 2 devices fits 1e\+06 bytes per device"):
        plan(TransformerShape(2, 64, 1).blocks(1e12), small, 4)
    with pytest.raises(ValueError, match="a stage of one layer of hidden size 64 needs"):
        largest_that_fits(TransformerShape(2, 64, 1), small)
    with pytest.raises(ValueError, match="execution must be one of no_pipelining, pipelined, recomputed, got 'zb'"):
        stage_bytes(Footprint(1, 1, 1), 2, "zb")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        plan(TransformerShape(2, 64, 1).blocks(1e12), small, 0)
