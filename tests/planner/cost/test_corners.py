"""The estimate compared with simulation where traffic determines the time: slow links, sharded weights, PipeDream."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.units import Unit
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.layer_costs import tensor_by_tensor_seconds
from megapipe.planner.cost.model import estimate, explain_stages, predict
from megapipe.planner.cost.run_layout import lay_run
from tests.planner.cost.runs import PLAIN, SMALL, closed_over_simulated, config_of, even_stages, layout, machine

SLOW, FAST = load_hardware("h100-25gbe"), load_hardware("a100-80")


def off(name: str, pipeline: int, microbatches: int, zero: int, tensor: int, *, slow: bool) -> float:
    """Closed over simulated seconds of four replicas."""
    config = layout(name, pipeline, microbatches, parallel={"data": 4, "tensor": tensor}, zero={"stage": zero})
    return closed_over_simulated(config, SLOW if slow else FAST)


@pytest.mark.one_in(14)
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 2), (2, 4), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("gpipe", 0.98, 1.04),
        ("1f1b", 0.93, 1.15),
        ("modular", 0.86, 1.06),
        ("interleaved_1f1b", 0.86, 1.06),
        ("zb_h1", 0.90, 1.05),
        ("pipedream", 0.99, 1.05),
        ("2bw", 0.95, 1.19),
    ],
)
def test_sharded_weights_that_travel_with_every_micro_batch(
    name: str, least: float, most: float, pipeline: int, microbatches: int, zero: int, slow: bool
) -> None:
    assert least <= off(name, pipeline, microbatches, zero, 1, slow=slow) <= most


def test_reductions_of_sharded_gradients_overlap_with_forwards_in_the_simulation_alone() -> None:
    """Each micro-batch but one has a forward during which the estimate lets the rank wait for reductions."""
    config = layout("1f1b", 4, 16, parallel={"data": 4}, zero={"stage": 2})
    closed = estimate(config, FAST, assumptions=PLAIN).step_seconds
    excess = closed - predict(config, FAST, assumptions=PLAIN).estimate.step_seconds
    forward = max(stage["forward"] for stage in explain_stages(config, FAST))
    assert excess == pytest.approx(15 * forward, rel=0.02)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1"])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 16)])
def test_messages_and_sums_over_slow_links(name: str, pipeline: int, microbatches: int, zero: int) -> None:
    """Four tensor ranks compute fast, and their messages wait for one another."""
    assert 0.89 <= off(name, pipeline, microbatches, zero, 4, slow=True) <= 1.12


@pytest.mark.one_in(5)
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 4), (4, 16)])
def test_pipedream_waits_for_its_sums_before_every_update(
    pipeline: int, microbatches: int, zero: int, tensor: int, slow: bool
) -> None:
    assert off("pipedream", pipeline, microbatches, zero, tensor, slow=slow) == pytest.approx(1.0, abs=0.025)


def test_sums_longer_than_compute_delay_every_micro_batch() -> None:
    """Four replicas, no pipeline, slow links: forward, sums after the backward of the first unit, update."""
    config = config_of(
        parallel={"data": 4}, schedule={"name": "pipedream"}, batch={"global_size": 16}, optimizer={"clip_norm": None}
    )
    slow = machine(0.0, 1e9)
    (stage,) = explain_stages(config, slow, assumptions=PLAIN)
    units = len(stage["layers"])
    backward = stage["backward_input"] + stage["backward_weight"]
    assert stage["reduction"] > 10 * backward
    least = 4 * (stage["forward"] + backward / units + stage["reduction"] + stage["update"])
    assert predict(config, slow, assumptions=PLAIN).estimate.step_seconds == pytest.approx(least, rel=1e-3)
    assert estimate(config, slow, assumptions=PLAIN).step_seconds == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(4, 2), (4, 4), (8, 8)])
def test_waiting_ranks_recompute_only_for_the_first_backward(name: str, pipeline: int, microbatches: int) -> None:
    """Full recomputation of four blocks a stage: the other three run between backwards of their micro-batch."""
    config = layout(name, pipeline, microbatches, recompute={"method": "full"})
    layers = 4 * pipeline
    config = replace(
        config,
        model=replace(SMALL, num_layers=layers),
        parallel=replace(config.parallel, layers_per_stage=even_stages(pipeline, layers)),
    )
    assert closed_over_simulated(config, machine()) == pytest.approx(1.0, rel=1e-9)


SHARDED: dict[str, Any] = {"parallel": {"data": 16}, "zero": {"stage": 3}, "batch": {"global_size": 16}}
LATENCY, BANDWIDTH = 1e-5, 1e9


def seconds_of_block() -> tuple[tuple[float, float], Unit]:
    """Seconds of sum and gather of a block, tensor by tensor, and the block."""
    run = lay_run(config_of(**deepcopy(SHARDED)), machine(LATENCY, BANDWIDTH))
    block = Unit(tuple(run.stages.layers[1].parameters.values()))
    return tensor_by_tensor_seconds(run, block, run.placement.groups("data")[0]), block


def test_rings_per_tensor_take_a_latency_per_replica() -> None:
    """All twelve tensors of a block are summed and its four matrices gathered, with two bytes per element."""
    (total, gather), block = seconds_of_block()
    num_bytes = 2 * sum(spec.num_elements for spec in block.specs)
    matrices = 2 * sum(spec.num_elements for spec in block.specs if spec.matrix)
    assert total == pytest.approx(15 * (12 * LATENCY + num_bytes / 16 / BANDWIDTH))
    assert gather == pytest.approx(15 * (4 * LATENCY + matrices / 16 / BANDWIDTH))


def test_recomputed_forwards_gather_single_tensors_again() -> None:
    early, seconds = Assumptions(slow_down=2.0, tensor_by_tensor=True), {}
    for method in ("none", "full"):
        config = config_of(**deepcopy(SHARDED), recompute={"method": method})
        seconds[method] = explain_stages(config, machine(LATENCY, BANDWIDTH), assumptions=early)[0]["gather"]
    (_, once), _ = seconds_of_block()
    assert seconds["full"] - seconds["none"] == pytest.approx(0.5 * 16 * once)
