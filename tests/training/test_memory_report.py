"""Out of memory: the report names the unit that asked for too much, and counts what was alive."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.parallel import MeshShape
from megapipe.engine.host_memory import Swaps
from megapipe.engine.step import EngineError
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import HostWeights
from megapipe.training.resilience.failures import OutOfMemory, _state_row, is_out_of_memory, out_of_memory_reported
from tests.optim.test_optimizer import SPECS
from tests.support.gpt_runs import GPT2_SHAPE, make_config, opened, write_shard


def allocate_too_much(*_: object) -> None:
    """Raise the error of torch's allocator when memory is exhausted."""
    torch.empty(2**50, dtype=torch.uint8)


def report_of(folder: Path, break_unit: str, backward: bool) -> str:
    """Run a step that fails in one block of the model, in the forward or the backward of micro-batch 2."""
    mesh: Mesh = connected_mesh(MeshShape({}), torch.device("cpu"))
    model = replace(GPT2_SHAPE, num_layers=3)
    config = make_config(write_shard(folder), model, batch={"global_size": 4}, schedule={"name": "gpipe"})
    replica, given = opened(mesh, config)
    stage = replica.stages[0]
    names = [stage.states[index].name for index in range(len(stage.units))]
    module = stage.units[names.index(break_unit)][0]
    assert isinstance(module, nn.Module)
    passes = 0

    def hook(_: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            if backward:
                output[0].register_hook(allocate_too_much)
            else:
                allocate_too_much()

    module.register_forward_hook(hook)
    with pytest.raises(OutOfMemory) as caught, out_of_memory_reported(replica.stages):
        replica.engine.run(given(0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("unit", "backward"),
    [("embedding", False), ("blocks.1", False), ("head", False), ("blocks.1", True), ("head", True)],
)
def test_a_pass_that_does_not_fit_names_its_unit(tmp_path: Path, unit: str, backward: bool) -> None:
    report = report_of(tmp_path, unit, backward)
    assert report.startswith(f"out of memory in unit {unit}: pipeline rank 0, step 0, action ")
    if backward:
        assert "BACKWARD stage 0 microbatch 2" in report
        return
    assert f"FORWARD stage 0 microbatch 2 version 0, unit {unit}: " in report
    assert "you tried to allocate 1125899906842624 bytes" in report
    if unit == "blocks.1":
        check_tables(report)


def check_tables(report: str) -> None:
    """Check that the tables count states and kept activations."""
    hidden, vocabulary = 32, 64
    block = 12 * hidden**2 + 13 * hidden
    rows = {
        match[1]: [float(value) for value in match[2].split()]
        for match in re.finditer(r"^  (\S.*?) {2,}([\d., ]+)$", report, re.MULTILINE)
    }
    for name, elements in (("blocks.0", block), ("embedding.word.weight", vocabulary * hidden)):
        weights, master, gradients, moments = rows[name]
        assert weights == pytest.approx(elements * 4 / 2**20, abs=0.051)
        assert (master, moments) == (0.0, 0.0)
        assert gradients == pytest.approx(weights * (2 if name.startswith("embedding") else 1), abs=0.051)
    assert {"stage 0, micro-batch 0", "stage 0, micro-batch 1"} <= rows.keys()
    assert "stage 0, micro-batch 2" not in rows
    assert rows["stage 0, micro-batch 0"] == rows["stage 0, micro-batch 1"]
    assert "batch.micro_size" in report


def test_host_weights_count_while_they_are_on_the_device() -> None:
    state, swaps = HostWeights("layer", SPECS, compute_dtype=torch.bfloat16), Swaps(torch.device("cpu"))
    size = state.table.num_elements
    assert _state_row(state) == ("layer", (0, 0, 4 * size, 0))
    state.gather_weights(0, swaps)
    assert _state_row(state) == ("layer", (2 * size, 0, 4 * size, 0))
    state.release_weights(0)
    swaps.reload_state(state)
    swaps.arrive(state)
    assert _state_row(state) == ("layer", (2 * size, 4 * size, 4 * size, 0))


def test_other_failures_are_not_taken_for_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    error = EngineError("step 0: shape mismatch")
    error.__cause__ = RuntimeError("shape mismatch")
    with pytest.raises(EngineError, match="shape mismatch"), out_of_memory_reported({}):
        raise error
