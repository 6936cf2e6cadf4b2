"""The output of `explain` against results by hand: formulas of the papers on a machine whose links have no latency.

Three layouts of a GPT whose stages between the first and the last hold nothing but blocks. FLOPs: Narayanan et al.
(2021, arXiv 2104.04473, equation 3). Tensor traffic: the same, section 3.2. Bubble: section 2.2.1. State of a mixed
precision run with Adam: 2 + 4 + 4 + 8 bytes a parameter, of which ZeRO's stages share out optimizer state, gradients
and weights (Rajbhandari et al. 2020, arXiv 1910.02054); sums of gradients in fp32.
"""

from typing import Any

import pytest

from tests.planner.command.plan import json_of

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, GLOBAL = 16, 1024, 16, 512, 256, 64
PIPELINE, BLOCKS = 4, 4
"""Stages, and blocks of each."""
INSIDE, OUTSIDE, PEAK = 100e9, 10e9, 100e12
"""Bytes per second inside a node and of a node's only adapter; FLOP/s of a device, all of them reached."""
MACHINE = f"""
name: ideal
groups:
- name: all
  device: {{name: accelerator, peak_flops: {{bf16: {PEAK}}}, memory_bytes: 80e9, memory_bandwidth: 1e15}}
  devices_per_node: 4
  inside: {{latency: 0, bandwidth: {INSIDE}}}
  outside: {{latency: 0, bandwidth: {OUTSIDE}, adapters: 1}}
"""
LAYOUTS = [
    {"tensor": 4, "data": 1, "zero": 0, "micro": 2, "recompute": "none"},
    {"tensor": 1, "data": 4, "zero": 1, "micro": 1, "recompute": "full"},
    {"tensor": 2, "data": 2, "zero": 3, "micro": 4, "recompute": "none"},
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda each: f"tensor {each['tensor']}, ZeRO {each['zero']}")
def explained(request, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout, and the output of explain for it."""
    layout = request.param
    machine = tmp_path_factory.mktemp("machine") / "ideal.yaml"
    machine.write_text(MACHINE)
    fields = {
        "model.num_layers": LAYERS, "model.hidden_size": HIDDEN, "model.num_heads": HEADS,
        "model.vocabulary_size": VOCABULARY, "model.max_positions": LENGTH, "model.tie_embeddings": "false",
        "data.sequence_length": LENGTH, "batch.global_size": GLOBAL, "batch.micro_size": layout["micro"],
        "parallel.pipeline": PIPELINE, "parallel.tensor": layout["tensor"], "parallel.data": layout["data"],
        "parallel.layers_per_stage": "[5,4,4,5]", "zero.stage": layout["zero"],
        "recompute.method": layout["recompute"], "training.precision": "bf16",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in fields.items()]
    return layout, json_of("explain", *flags, f"--hardware={machine}")


def test_flops_are_equation_3(explained) -> None:
    """3 of its 4 forwards are the model's; with full recomputation all 4 are run, of blocks and not of the head."""
    layout, report = explained
    blocks = 72 * GLOBAL * LENGTH * LAYERS * HIDDEN**2 * (1 + LENGTH / (6 * HIDDEN))
    head = 6 * GLOBAL * LENGTH * HIDDEN * VOCABULARY
    devices = PIPELINE * layout["tensor"] * layout["data"]
    flops = report["model_tflops_per_device"] * 1e12 * report["step_time_s"] * devices
    assert flops == pytest.approx(blocks + head, rel=1e-6)
    again = blocks / 3 if layout["recompute"] == "full" else 0.0
    executed = report["executed_tflops_per_device"] * 1e12 * report["step_time_s"] * devices
    assert executed == pytest.approx(flops + again, rel=1e-2)


def test_a_stage_computes_for_its_flops_over_the_peak(explained) -> None:
    """Memory is so fast that products alone count; a fused kernel works out half of the causal scores."""
    layout, report = explained
    forward = 24 * layout["micro"] * LENGTH * HIDDEN**2 * (1 + LENGTH / (12 * HIDDEN)) * BLOCKS / layout["tensor"]
    stage = report["stages"][1]
    assert stage["forward"] == pytest.approx(forward / PEAK, rel=0.02)
    assert stage["backward_input"] + stage["backward_weight"] == pytest.approx(2 * forward / PEAK, rel=0.02)
    if layout["recompute"] == "full":
        assert stage["recompute"] == pytest.approx(forward / PEAK, rel=0.02)


def test_tensor_ranks_send_8_bsh_a_layer(explained) -> None:
    """Half as much more where a forward is recomputed."""
    layout, report = explained
    ranks = layout["tensor"]
    elements = 8 * layout["micro"] * LENGTH * HIDDEN * (ranks - 1) / ranks * BLOCKS
    assert report["stages"][1]["tensor"] == pytest.approx(2 * elements / INSIDE, rel=1e-3)


def test_the_bubble_is_p_minus_1_micro_batches(explained) -> None:
    """The last recomputed block may run before the gradient arrives, within the time that is waited anyway; the
    others wait for the backwards of later blocks. Where weights are sharded the filling waits for them too: the closed
    form then agrees with the simulation of the schedule."""
    layout, report = explained
    stages = report["stages"]
    phases = ("forward", "backward_input", "backward_weight", "tensor")
    later = (BLOCKS - 1) / BLOCKS
    slowest = max(sum(stage[name] for name in phases) + later * stage["recompute"] for stage in stages)
    bubble = sum(term["seconds"] for term in report["closed_form"]["terms"] if term["name"] == "bubble")
    if layout["zero"] < 3:
        assert bubble == pytest.approx((PIPELINE - 1) * slowest, rel=0.06)
    else:
        assert bubble > (PIPELINE - 1) * slowest
        assert report["closed_form"]["step_time_s"] == pytest.approx(report["step_time_s"], rel=0.1)


def test_state_is_18_bytes_per_parameter_sharded_by_zero(explained) -> None:
    layout, report = explained
    ranks, replicas, zero = layout["tensor"], layout["data"], layout["zero"]
    parameters = BLOCKS * 12 * HIDDEN**2 / ranks
    memory = report["memory"][1]
    for name, size, stage in (("weights", 2, 3), ("gradients", 4, 2), ("master", 4, 1), ("moments", 8, 1)):
        shared = replicas if zero >= stage else 1
        assert memory[name] == pytest.approx(size * parameters / shared, rel=3e-3), name


def test_replicas_send_their_gradients_in_fp32(explained) -> None:
    """A ring's all-reduce sends 2 (d - 1) / d of them, a reduce-scatter half as much."""
    layout, report = explained
    replicas, zero = layout["data"], layout["zero"]
    parameters = BLOCKS * 12 * HIDDEN**2 / layout["tensor"]
    bytes_sent = (1 if zero else 2) * (replicas - 1) / replicas * 4 * parameters
    reduction = report["stages"][1]["reduction"]
    assert (reduction > 0) == (replicas > 1)
    # Ranks of a node send at once through its one adapter, whose rate they share.
    assert reduction == pytest.approx(bytes_sent * 4 / OUTSIDE, rel=0.02)
