"""The estimate compared with simulation where traffic determines the time: slow links, sharded weights, PipeDream."""

from dataclasses import replace
from typing import Any

import pytest

from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.units import Unit
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.layer_costs import tensor_by_tensor_seconds
from megapipe.planner.cost.model import estimate, explain_stages, predict
from megapipe.planner.cost.run_layout import lay_run
from tests.planner.cost.runs import SMALL, config_of, even_stages, machine

PLAIN = Assumptions(slow_down=1.0)
"""As the simulator: what runs side by side does not slow down."""
SLOW, FAST = load_hardware("h100-25gbe"), load_hardware("a100-80")


def off(name: str, pipeline: int, microbatches: int, zero: int, tensor: int, *, slow: bool) -> float:
    """Closed over simulated seconds of four replicas."""
    chunks = 2 if name in ("interleaved_1f1b", "modular") else 1
    groups: dict[str, Any] = {
        "parallel": {
            "pipeline": pipeline,
            "data": 4,
            "tensor": tensor,
            "layers_per_stage": even_stages(pipeline * chunks),
        },
        "schedule": {"name": name},
        "batch": {"global_size": 4 * microbatches},
        "zero": {"stage": zero},
        "optimizer": {"clip_norm": None if name == "pipedream" else 1.0},
    }
    config, hardware = config_of(**groups), SLOW if slow else FAST
    closed = estimate(config, hardware, assumptions=PLAIN).step_seconds
    return closed / predict(config, hardware, assumptions=PLAIN).estimate.step_seconds


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
    stages = even_stages(pipeline, 4 * pipeline)
    config = config_of(
        replace(SMALL, num_layers=4 * pipeline),
        parallel={"pipeline": pipeline, "layers_per_stage": stages},
        schedule={"name": name},
        batch={"global_size": microbatches},
        recompute={"method": "full"},
    )
    closed = estimate(config, machine(), assumptions=PLAIN).step_seconds
    assert closed == pytest.approx(predict(config, machine(), assumptions=PLAIN).estimate.step_seconds, rel=1e-9)


def test_rings_per_tensor_take_a_latency_per_replica() -> None:
    """All twelve tensors of a block are summed and its four matrices gathered, with two bytes per element."""
    latency, bandwidth = 1e-5, 1e9
    run = lay_run(
        config_of(parallel={"data": 16}, zero={"stage": 3}, batch={"global_size": 16}), machine(latency, bandwidth)
    )
    unit = Unit(tuple(run.stages.layers[1].parameters.values()))
    group = run.placement.groups("data")[0]
    steps, num_bytes = 15, 2 * sum(spec.num_elements for spec in unit.specs)
    matrices = 2 * sum(spec.num_elements for spec in unit.specs if spec.matrix)
    seconds = tensor_by_tensor_seconds(run, unit, group)
    assert seconds[0] == pytest.approx(steps * (12 * latency + num_bytes / 16 / bandwidth))
    assert seconds[1] == pytest.approx(steps * (4 * latency + matrices / 16 / bandwidth))


def test_recomputed_forwards_gather_single_tensors_again() -> None:
    early = Assumptions(slow_down=2.0, tensor_by_tensor=True)
    seconds = {}
    for method in ("none", "full"):
        config = config_of(
            parallel={"data": 16}, zero={"stage": 3}, recompute={"method": method}, batch={"global_size": 16}
        )
        seconds[method] = explain_stages(config, machine(1e-5, 1e9), assumptions=early)[0]["gather"]
    run = lay_run(config, machine(1e-5, 1e9))
    block = Unit(tuple(run.stages.layers[1].parameters.values()))
    once = tensor_by_tensor_seconds(run, block, run.placement.groups("data")[0])[1]
    assert seconds["full"] - seconds["none"] == pytest.approx(0.5 * 16 * once)
