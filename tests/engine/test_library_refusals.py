"""A Pipeline refuses wrong input by name before it trains, and releases its resources."""

import gc
import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megapipe.config.memory import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.step import EngineError
from megapipe.engine.user_modules import PipelineError
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import ScheduleError, dumps, order
from megapipe.schedules.states import StateTable, StateUnit
from tests.engine import test_library_context as attention
from tests.engine.library_models import WIDTH, adoptable, batch, loss, pipeline
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


class Direct(attention.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.scaled_dot_product_attention(x, x, x)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


MUON, ALL = OptimizerConfig(name="muon"), OffloadConfig(activations="blocks", optimizer=True, weights=True)
LINEAR = nn.Linear(8, 8)
WORDS, TOKENS = attention.Words(), (torch.zeros(2, 8, dtype=torch.int64),) * 2
CONTEXT = {"context": 2, "sample": TOKENS}
REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([LINEAR], {"microbatches": "4"}, "microbatches is '4'; it must be a whole number"),
    # Layers.
    ([nn.Linear(8, 4), nn.Linear(8, 4)], {}, r"layer 1 \(Linear\) fails for the output of layer 0, \[2, 4\] f"),
    ([nn.Linear(4, 4)], {}, r"layer 0 \(Linear\) fails for the sample, \[2, 8\] float32"),
    ([LINEAR, nn.BatchNorm1d(8)], {}, r"layer 1 \(BatchNorm1d\) changes its buffer 'num_batches"),
    ([nn.Linear(8, 16), Frozen()], {}, r"parameter 1.weight has requires_grad=False; register it as a buf"),
    ([LINEAR, Unused(8, 8)], {}, r"parameter 1.bias gets no gradient: nothing that layer 1"),
    ([LINEAR, nn.ReLU(inplace=True)], {}, r"layer 1 \(ReLU\) .* in-place operation"),
    ([Data(8, 8)], {}, r"layer 0 \(Data\) fails for"),
    ([InPlace(8, 8)], {}, r"layer 0 \(InPlace\) changes an input in place; .* a clone instead"),
    ([Plain()], {}, "fails for the sample.*meta.*register what a layer keeps as a buffer"),
    ([nn.Tanh(), nn.ReLU()], {}, "none of the 2 layers has a parameter"),
    (
        [LINEAR, Detaching(), nn.Linear(8, 8)],
        {},
        r"parameter 0.weight gets no gradient: the layers after layer 0 \(Linear\) drop or detach",
    ),
    ([nn.LSTM(8, 8)], {}, "a layer returned tuple; it must return a tensor or a tuple of tensors"),
    ([lambda: 3], {}, "made a int; it must make a torch.nn.Module"),
    ([nn.Linear(8, 8, device="meta")], {}, "layer 0 is on the meta device: pass a function that creates it instead"),
    ([LINEAR, nn.LayerNorm(8).half()], {}, r"several dtypes \(0.weight float32, 1.weight float16\)"),
    ([nn.LayerNorm(8).half()], {"sample": torch.empty(2, 8).half()}, "parameters are float16; convert"),
    ([LINEAR], {"sample": torch.tensor(1.0)}, "must be tensors whose first axis is rows"),
    # Schedules and settings.
    (
        [LINEAR] * 3,
        {"schedule": "modular", "chunks": 4},
        r"3 layers cannot fill 4 stages \(1 pipeline ranks, 4 each\)",
    ),
    ([LINEAR] * 3, {"layers_per_stage": [1, 1, 2, 1]}, "must be 1 numbers .* with sum 3"),
    ([LINEAR], {"schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean '1f1b'?"),
    ([LINEAR], {"schedule": "mine.txt"}, "cannot read mine.txt: No such file or directory"),
    ([LINEAR], {"schedule": "pipedream"}, "before the norm of the step's gradients is known"),
    (
        [LINEAR],
        {"optimizer": "adamw"},
        r"optimizer is 'adamw'; it must be settings, such as OptimizerConfig\(name='adamw'",
    ),
    (
        [LINEAR],
        {"optimizer": OptimizerConfig(name="adam")},
        "optimizer.name is adam; it must be one of adamw, sgd, muon",
    ),  # type: ignore[arg-type]
    (
        [LINEAR],
        {"loss": nn.MSELoss()},
        r"the loss is MSELoss\(reduction='mean'\), but .* use MSELoss\(reduction='sum'\)",
    ),
    ([LINEAR], {"sample": [1, 2]}, "the sample of type list contains int; pass a tensor, or a tuple of tensors"),
    ([LINEAR], {"timeout": -1.0}, "timeout is -1.0; it must be above 0 seconds"),
    (
        [LINEAR],
        {"optimizer": MUON},
        "optimizer muon has no matrix to update: no layer between the first and the last has a 2-D weight",
    ),
    ([], {"optimizer": MUON, "matrices": ["1.norm.weight"]}, "matrices names 1.norm.weight, but the 2-D weights are"),
    ([], {"recompute": [7]}, r"recompute names layers \[7\]; the layers are 0 to 2"),
    # State and layouts.
    ([], {"tensor": 2}, "no layer contains a megapipe.layers.ColumnLinear"),
    ([], {"zero": 2}, "zero.stage is 2 but there is only one replica"),
    ([], {"data": 2, "zero": 4}, "zero is 4; it must be from 0 to 3"),
    ([], {"zero": 4}, "^zero is 4; it must be from 0 to 3$"),
    ([], {"data": 2, "offload": ALL, "zero": 1}, "cannot be combined with zero stage 1"),
    ([], {"offload": OffloadConfig(activations="auto", memory=1.0)}, "modules of your own have none; set offload"),
    ([], {"offload": OffloadConfig(activations="blocks"), "recompute": True}, "nothing to move"),
    ([], {"offload": ALL, "schedule": "2bw"}, "2bw never flushes"),
    # Modules that mix tokens of context ranks.
    ([WORDS, Direct(True)], CONTEXT, r"layer 1 \(Direct\) calls scaled_dot_product_attention"),
    (
        [nn.TransformerEncoderLayer(8, 2)],
        {"context": 2, "sample": torch.ones(2, 4, 8)},
        "has self_attn, a torch.nn.MultiheadAttention, which mixes tokens",
    ),
    ([WORDS, Mean(), LINEAR], CONTEXT, r"returns \[2, 16\] float32 for 4 tokens of a sample"),
    (
        [nn.Linear(3, 4)],
        {"context": 2, "sample": torch.ones(2, 3)},
        "axis 1 of each tensor must be tokens, .* a multiple of 2",
    ),
    (attention.model(True), {"context": 2, "sample": [each[:, :6] for each in TOKENS]}, "use a multiple of 4 tokens"),
]


@pytest.mark.parametrize(("layers", "changes", "message"), REFUSED, ids=itertools.count())
def test_what_cannot_run_is_named_before_the_first_step(
    layers: list[Any], changes: dict[str, Any], message: str
) -> None:
    sizes = {name: changes[name] for name in ("data", "tensor", "context") if name in changes}
    options = {name: value for name, value in changes.items() if name not in sizes}
    sample = {"sample": torch.ones(2, 8)} if layers else {}

    def build(mesh: Mesh) -> None:
        with pytest.raises(ValueError, match=message) as refused:
            pipeline(mesh=mesh, layers=layers, **{**sample, **options})
        assert (layers and not sizes) or "\n" not in str(refused.value)

    run_threads(sizes, build)


def test_files_with_several_state_units_per_layer_are_refused(tmp_path: Path) -> None:
    """A library user's layer is one whole state unit, because nothing says which weights a second one has."""
    states = StateTable(((StateUnit(0), StateUnit(0)),))
    plain = order("gpipe", 1, 2)
    path = tmp_path / "apart.txt"
    path.write_text(dumps(replace(plain, header=replace(plain.header, states=states))))
    with pytest.raises(ScheduleError, match=r"it was made for state units .* but this run has"):
        pipeline(layers=[nn.Embedding(8, 8)], schedule=str(path))


def test_ranks_with_different_layers_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"rank \d was given other layers or another sample than rank \d"):
        run_threads({"pipeline": 2}, lambda mesh: pipeline(mesh=mesh, layers=adoptable(3 + mesh.rank)))


def test_a_batch_that_does_not_fit_is_refused() -> None:
    made, tokens = pipeline(), torch.zeros(4, 5, dtype=torch.int64)
    for inputs, message in (
        (tokens[:3], r"inputs of shape \[3, 5\] cannot be split into 2 micro-batches"),
        (tokens[:2], r"a micro-batch of the inputs is \[1, 5\] int64, .* built for \[2, 5\] int64"),
        (None, "give it the inputs"),
    ):
        with pytest.raises(PipelineError, match=message):
            made.step(inputs, tokens)
    for targets, message in (
        (tokens[:2], r"a micro-batch of the targets is \[1, 5\] int64, but one of the inputs has 2 rows"),
        (tokens.numpy(), "targets of type ndarray contains ndarray; pass a tensor"),
    ):
        with pytest.raises(PipelineError, match=message):
            made.step(tokens, targets)
    for rate in (-1e-3, float("nan"), "1e-3"):
        with pytest.raises(PipelineError, match=f"learning_rate is {rate!r}; it must be finite and at least 0"):
            made.step(tokens, tokens, learning_rate=rate)  # type: ignore[arg-type]
    assert made.step(tokens, tokens)[0].step == 0, "a refused batch counts as a step"


def matches(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A number without a gradient."""
    return (logits.argmax(-1) == targets).float().sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda logits, _: logits}, r"the loss has shape \[2, 5, 11\]; it must be one number"),
        ({"loss": matches}, "the loss depends on no parameter"),
        ({"loss": matches, "schedule": "zb_h1"}, "the loss depends on no parameter"),
        *(
            ({"count": lambda _, share=share: share}, rf"count gave {share} for the targets \[2, 5\] int64")
            for share in (float("nan"), float("inf"), -1.0)
        ),
    ],
)
def test_losses_and_counts_that_train_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError if "count" in changes else EngineError, match=message):
        pipeline(**changes).step(*batch(0, 2))


def test_counts_below_one_divide_like_any_other() -> None:
    small, large = (pipeline(count=lambda _, share=share: share).step(*batch(0, 2))[0] for share in (0.125, 8.0))
    assert small.loss == 64.0 * large.loss
    assert small.gradient_norm == pytest.approx(64.0 * large.gradient_norm, rel=1e-6)


class Autocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_outputs_whose_type_differs_from_meta_tensors_are_named() -> None:
    def step(mesh: Mesh) -> None:
        pipeline(mesh=mesh, layers=[Autocast(8, 8), LINEAR], sample=torch.ones(2, 8), loss=torch.sum).step(
            torch.zeros(4, 8)
        )

    message = r"SEND_ACTIVATION .* returned \[2, 8\] bfloat16, but declared \[2, 8\] float32"
    with pytest.raises(EngineError, match=message):
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
    made = pipeline(loss=failing, schedule=schedule)
    with pytest.raises((EngineError, KeyboardInterrupt)):
        made.step(*batch(0, 2))
    with pytest.raises(EngineError, match=r"failed and left partial gradients \(.*step 0"):
        made.step(*batch(0, 2))
    with pytest.raises(EngineError, match="partial gradients"):
        made.drain()


def seconds_until_failure(mesh: Mesh) -> tuple[float, str]:
    """How long a rank takes to find out that the last one has failed, which lives on."""

    def failing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad batch")

    made = pipeline(mesh=mesh, loss=failing, timeout=40.0)
    start = time.monotonic()
    with pytest.raises(EngineError) as raised:
        made.step(*batch(0, 2))
    seconds = time.monotonic() - start
    mesh.world.barrier()
    return seconds, str(raised.value)


def test_a_failure_on_one_rank_soon_fails_everywhere() -> None:
    first, second = run_mesh({"pipeline": 2}, seconds_until_failure, backend="processes", timeout=120.0)
    assert "bad batch" in second[1]
    assert "rank 0 waited for rank 1 to send message 0" in first[1]
    assert first[0] < 20.0


def files_of_closed_pipelines(mesh: Mesh, schedule: str) -> list[int]:
    """Open files after each of a few pipelines that were used and closed, without the collector's help."""
    gc.disable()
    counts = []
    for _ in range(4):
        made = pipeline(mesh=mesh, schedule=schedule)
        made.step(*batch(0, 2))
        made.drain()
        made.close()
        mesh.world.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.exhaustive), "2bw"])
def test_a_closed_pipeline_leaves_no_open_files(schedule: str) -> None:
    for counts in run_mesh({"pipeline": 2}, files_of_closed_pipelines, schedule, backend="processes", timeout=120.0):
        assert len(set(counts)) == 1, counts


def test_weights_cannot_be_read_during_a_step() -> None:
    made = pipeline(schedule="2bw")
    assert made.step(*batch(0, 2)) == ()
    with pytest.raises(PipelineError, match="step 0 is in progress; call drain first"):
        made.state_dict()
    assert [result.step for result in made.drain()] == [0]
    made.state_dict()
