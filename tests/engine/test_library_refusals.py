"""A Pipeline refuses wrong input by name before it trains, and releases its resources."""

import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import EngineError, StepResult
from megapipe.engine.user_modules import PipelineError
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import ScheduleError, dumps, order
from megapipe.schedules.states import StateTable, StateUnit
from tests.engine.library_models import SAMPLE, SGD, WIDTH, adoptable, batch, loss, solo
from tests.support.meshes import run_mesh, run_threads


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Unused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Detaching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mask = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask)


class Data(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else super().forward(x)


ERRORS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "shapes": (
        [nn.Linear(8, 4), nn.Linear(8, 4)],
        {},
        r"layer 1 \(Linear\) fails for the output of layer 0, \[2, 4\] f",
    ),
    "sample": ([nn.Linear(4, 4)], {}, r"layer 0 \(Linear\) fails for the sample, \[2, 8\] float32"),
    "statistics": (
        [nn.Linear(8, 8), nn.BatchNorm1d(8)],
        {},
        r"layer 1 \(BatchNorm1d\) changes its buffer 'num_batches",
    ),
    "frozen": (
        [nn.Linear(8, WIDTH), Frozen()],
        {},
        r"parameter 1.weight has requires_grad=False; register it as a buf",
    ),
    "unused": ([nn.Linear(8, 8), Unused(8, 8)], {}, r"parameter 1.bias gets no gradient: nothing that layer 1"),
    "in place": ([nn.Linear(8, 8), nn.ReLU(inplace=True)], {}, r"layer 1 \(ReLU\) .* in-place operation"),
    "values": ([Data(8, 8)], {}, r"layer 0 \(Data\) fails for"),
    "sample in place": ([InPlace(8, 8)], {}, r"layer 0 \(InPlace\) changes an input in place; .* a clone instead"),
    "plain tensor": ([Plain()], {}, "fails for the sample.*meta.*register what a layer keeps as a buffer"),
    "no parameters": ([nn.Tanh(), nn.ReLU()], {}, "none of the 2 layers has a parameter"),
    "cut off": (
        [nn.Linear(8, 8), Detaching(), nn.Linear(8, 8)],
        {},
        r"parameter 0.weight gets no gradient: the layers after layer 0 \(Linear\) drop or detach",
    ),
    "no tensor": ([nn.LSTM(8, 8)], {}, "a layer returned tuple; it must return a tensor or a tuple of tensors"),
    "maker": ([lambda: 3], {}, "made a int; it must make a torch.nn.Module"),
    "meta": (
        [nn.Linear(8, 8, device="meta")],
        {},
        "layer 0 is on the meta device: pass a function that creates it instead",
    ),
    "too few": ([nn.Linear(8, 8)] * 3, {"chunks": 4}, r"3 layers cannot fill 4 stages \(1 pipeline ranks, 4 each\)"),
    "by hand": ([nn.Linear(8, 8)] * 3, {"layers_per_stage": [1, 1, 2, 1]}, "must be 1 numbers .* with sum 3"),
    "dtypes": (
        [nn.Linear(8, 8), nn.LayerNorm(8).half()],
        {},
        r"several dtypes \(0.weight float32, 1.weight float16\)",
    ),
    "half": ([nn.LayerNorm(8).half()], {"sample": torch.empty(2, 8).half()}, "parameters are float16; convert"),
    "scalar": ([nn.Linear(8, 8)], {"sample": torch.tensor(1.0)}, "must be tensors whose first axis is rows"),
    "schedule": ([nn.Linear(8, 8)], {"schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean '1f1b'?"),
    "timeout": ([nn.Linear(8, 8)], {"timeout": -1.0}, "timeout is -1.0; it must be above 0 seconds"),
    "muon": (
        [nn.Linear(8, 8)],
        {"optimizer": OptimizerConfig(name="muon")},
        "optimizer muon has no matrix to update: no layer between the first and the last has a 2-D weight",
    ),
    "no file": ([nn.Linear(8, 8)], {"schedule": "mine.txt"}, "cannot read mine.txt: No such file or directory"),
    "clipping": ([nn.Linear(8, 8)], {"schedule": "pipedream"}, "before the norm of the step's gradients is known"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_run_is_named_before_the_first_step(case: str) -> None:
    layers, changes, message = ERRORS[case]
    arguments: dict[str, Any] = {"loss": loss, "sample": torch.empty(2, 8), "microbatches": 2, **changes}
    if "chunks" in changes:
        arguments["schedule"] = "modular"
    with pytest.raises(ValueError, match=message):
        Pipeline(layers, solo(), **arguments)


def test_files_with_several_state_units_per_layer_are_refused(tmp_path: Path) -> None:
    """A library user's layer is one whole state unit, because nothing says which weights a second one has."""
    states = StateTable(((StateUnit(0), StateUnit(0)),))
    plain = order("gpipe", 1, 2)
    path = tmp_path / "apart.txt"
    path.write_text(dumps(replace(plain, header=replace(plain.header, states=states))))
    with pytest.raises(ScheduleError, match=r"it was made for state units .* but this run has"):
        Pipeline([nn.Embedding(8, 8)], solo(), loss=loss, sample=SAMPLE, microbatches=2, schedule=str(path))


def test_ranks_with_different_layers_are_refused() -> None:
    def build(mesh: Mesh) -> None:
        Pipeline(adoptable(3 + mesh.rank), mesh, loss=loss, sample=SAMPLE, microbatches=2)

    with pytest.raises(PipelineError, match=r"rank \d was given other layers or another sample than rank \d"):
        run_threads({"pipeline": 2}, build)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, optimizer=SGD)
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with pytest.raises(PipelineError, match=r"inputs of shape \[3, 5\] cannot be split into 2 micro-batches"):
        pipeline.step(tokens[:3], tokens)
    with pytest.raises(
        PipelineError, match=r"a micro-batch of the inputs is \[1, 5\] int64, .* built for \[2, 5\] int64"
    ):
        pipeline.step(tokens[:2], tokens)
    with pytest.raises(PipelineError, match="give it the batch's inputs"):
        pipeline.step(targets=tokens)
    assert pipeline.step(tokens, tokens)[0].step == 0, "a refused batch counts as a step"


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    pipeline = Pipeline(
        adoptable(1), solo(), loss=lambda logits, _: logits, sample=SAMPLE, microbatches=2, optimizer=SGD
    )
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"the loss has shape \[2, 5, 11\]; it must be one number"):
        pipeline.step(tokens, tokens)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_loss_without_gradient_is_refused(schedule: str) -> None:
    pipeline = Pipeline(
        adoptable(1),
        solo(),
        loss=lambda logits, targets: (logits.argmax(-1) == targets).float().sum(),
        sample=SAMPLE,
        microbatches=2,
        schedule=schedule,
    )
    with pytest.raises(EngineError, match="the loss depends on no parameter"):
        pipeline.step(*batch(0, 2))


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1.0])
def test_counts_that_divide_nothing_are_refused(share: float) -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, count=lambda targets: share)
    with pytest.raises(PipelineError, match=rf"count gave {share} for the targets \[2, 5\] int64"):
        pipeline.step(*batch(0, 2))


def test_counts_below_one_divide_like_any_other() -> None:
    def first_step(share: float) -> StepResult:
        pipeline = Pipeline(
            adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, count=lambda targets: share
        )
        return pipeline.step(*batch(0, 2))[0]

    small, large = first_step(0.125), first_step(8.0)
    assert small.loss == 64.0 * large.loss
    assert small.gradient_norm == pytest.approx(64.0 * large.gradient_norm, rel=1e-6)


class Autocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_outputs_whose_type_differs_from_meta_tensors_are_named() -> None:
    def step(mesh: Mesh) -> None:
        pipeline = Pipeline(LAYERS, mesh, loss=lambda y: y.sum(), sample=torch.empty(2, 8), microbatches=2)
        pipeline.step(torch.zeros(4, 8))

    LAYERS = [Autocast(8, 8), nn.Linear(8, 8)]
    with pytest.raises(
        EngineError, match=r"SEND_ACTIVATION .* returned \[2, 8\] bfloat16, but declared \[2, 8\] float32"
    ):
        run_threads({"pipeline": 2}, step)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("failure", [ValueError("bad batch"), KeyboardInterrupt()])
def test_a_pipeline_whose_step_failed_runs_no_other(schedule: str, failure: BaseException) -> None:
    """Its gradients are partial: the next step would add to them."""

    def failing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            raise failure
        return loss(logits, targets)

    calls: list[int] = []
    pipeline = Pipeline(adoptable(1), solo(), loss=failing, sample=SAMPLE, microbatches=2, schedule=schedule)
    with pytest.raises((EngineError, KeyboardInterrupt)):
        pipeline.step(*batch(0, 2))
    with pytest.raises(EngineError, match=r"failed and left partial gradients \(.*step 0"):
        pipeline.step(*batch(0, 2))
    with pytest.raises(EngineError, match="partial gradients"):
        pipeline.drain()


def seconds_until_failure(mesh: Mesh) -> tuple[float, str]:
    """How long a rank takes to find out that the last one has failed, which lives on."""

    def failing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad batch")

    pipeline = Pipeline(adoptable(1), mesh, loss=failing, sample=SAMPLE, microbatches=2, timeout=40.0)
    start = time.monotonic()
    with pytest.raises(EngineError) as raised:
        pipeline.step(*batch(0, 2))
    seconds = time.monotonic() - start
    mesh.world.barrier()
    return seconds, str(raised.value)


def test_a_failure_on_one_rank_soon_fails_everywhere() -> None:
    first, second = run_mesh({"pipeline": 2}, seconds_until_failure, backend="processes", timeout=120.0)
    assert "bad batch" in second[1]
    assert "rank 0 waited for rank 1 to send message 0" in first[1]
    assert first[0] < 20.0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def files_of_closed_pipelines(mesh: Mesh, schedule: str) -> list[int]:
    """Open files after each of a few pipelines that were used and closed, without the collector's help."""
    gc.disable()
    counts = []
    for _ in range(4):
        pipeline = Pipeline(adoptable(1), mesh, loss=loss, sample=SAMPLE, microbatches=2, schedule=schedule)
        pipeline.step(*batch(0, 2))
        pipeline.drain()
        pipeline.close()
        mesh.world.barrier()
        counts.append(open_files())
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.exhaustive), "2bw"])
def test_a_closed_pipeline_leaves_no_open_files(schedule: str) -> None:
    for counts in run_mesh({"pipeline": 2}, files_of_closed_pipelines, schedule, backend="processes", timeout=120.0):
        assert len(set(counts)) == 1, counts


def test_weights_cannot_be_read_during_a_step() -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, schedule="2bw")
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    assert pipeline.step(tokens, tokens) == ()
    with pytest.raises(PipelineError, match="step 0 is in progress; call drain before state_dict"):
        pipeline.state_dict()
    assert [result.step for result in pipeline.drain()] == [0]
    pipeline.state_dict()
