"""Launches of the project's own kernels in a step: the number that the ops of the layers declare, on every rank.

test_train.py checks them for every option and layout that it trains."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout import costs
from megapipe.layout.prediction import predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import lowered_schedule
from megapipe.spec import linear
from tests.distributed.test_covering import OPTIONS as LAYOUTS_WITH_OPTIONS
from tests.fake_cuda import runs
from tests.fake_cuda.options import DROPOUT, EXPERTS_OF, FP8, WIDE, corpora, shortened
from tests.fake_cuda.server import run_fake
from tests.support.bert_runs import POST_NORM, make_bert_config
from tests.support.covering import Case
from tests.support.gpt_runs import make_config
from tests.support.layouts import BASE, Change, config_of, world_size

__all__ = ["corpora"]

NORM_FORWARD, NORM_BACKWARD = "norms", "norms_backward"
NORM = {
    "forward": {NORM_FORWARD: 1},
    "backward": {NORM_BACKWARD: 2},  # rows, and the sum of their parts of the weight's gradient
    "input half": {NORM_BACKWARD: 1},
    "weight half": {NORM_BACKWARD: 2},
}


def once(forward: str, backward: str | None = None) -> dict[str, dict[str, int]]:
    """Return the launches of an op with one kernel for each direction, whose weight half does nothing."""
    return {
        "forward": {forward: 1},
        "backward": {backward or forward: 1},
        "input half": {backward or forward: 1},
        "weight half": {},
    }


LAUNCHES = {
    "layer_norm": NORM,
    "layer_norm_without_bias": NORM,
    "rms_norm": NORM,
    "rms_norm_unit_offset": NORM,
    "attention_probabilities": once("attention"),
    "linear_cross_entropy": once("cross_entropy"),
    **{name: once(name) for name in ("rotary", "swiglu", "gelu", "dropout", "bias_dropout_residual", "cross_entropy")},
    "bias_gelu": once("gelu"),
    **{name: {} for name in ("swiglu_clamped", "geglu", "reglu", "relu", "relu_squared", "silu")},  # torch
    "softcapped_linear_cross_entropy": {},
}
"""Op -> phase -> kernels, as `group` names them -> launches of one call."""


def group(launch: str) -> str:
    """Return what `LAUNCHES` calls a Triton kernel: the op in its name, else its module."""
    module, _, kernel = launch.removeprefix("triton ").partition(".")
    named = ("rotary", "gelu", "swiglu", "bias_dropout_residual", "dropout")
    return next((op for op in named if kernel.startswith(op)), module)


def check_launches(config: PretrainConfig, reports: Sequence[runs.Report]) -> None:
    """Compare the launches of every rank of the first step with the walk of its schedule."""
    config = replace(config, parallel=replace(config.parallel, data=config.parallel.data or 1))
    schedule = lowered_schedule(config, StageLayout.of(config))
    for rank, report in enumerate(reports):
        counted = Counter[str]()
        for name, times in report.phases["first step"].launches.items():
            if name.startswith("triton ") and group(name) != "optimizer":
                counted[group(name)] += times
        walked = Counter[str]()
        for (op, phase), calls in predict_rank(config, schedule, rank, device="cuda").kernel_calls().items():
            for module, times in LAUNCHES[op].get(phase, {}).items():
                walked[module] += calls * times
        assert counted == +walked, rank


def check_one_step(config: PretrainConfig, *, ranks: int, chunk_bytes: int | None = None) -> None:
    """Check launches without evaluation and rehearsal.

    chunk_bytes: of logits that the backward recomputes, in place of `linear.CHUNK_BYTES`.
    """
    few: dict[str, Any] = {"steps": 1, "rehearsed": False, "chunk_bytes": chunk_bytes}
    check_launches(config, run_fake(runs.train, config, ranks=ranks, timeout=300.0, **few))


SAMPLE: tuple[Case, ...] = (
    {"model": "gpt2", "context": "2 ring", "schedule": "zb_h1", "documents": "isolated"},
    {"model": "bert", "tensor": "2", "recompute": "logits", "schedule": "gpipe"},
    {"model": "bert", "context": "2 ring", "schedule": "1f1b in halves"},
    {"model": "gpt2", "tensor": "2", "recompute": "selective", "schedule": "zb_v"},
)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: ", ".join(case.values()))
def test_launches_of_a_few_layouts_are_declared(case: Case, corpora: tuple[str, BertDataConfig]) -> None:
    check_one_step(shortened(config_of({**BASE, **case}, *corpora), 2), ranks=world_size(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "change"), LAYOUTS_WITH_OPTIONS, ids=lambda part: ", ".join(map(str, part.values())))
def test_launches_of_layouts_with_options_are_declared(
    case: Case, change: Change, corpora: tuple[str, BertDataConfig]
) -> None:
    config = config_of({**BASE, **case}, *corpora)
    for name, fields in change.items():
        setattr(config, name, replace(getattr(config, name), **fields))
    check_one_step(shortened(config), ranks=world_size(case))


BLOCKS: Mapping[str, tuple[ModelConfig, dict[str, Any]]] = {
    "dropout": (DROPOUT, {}),
    "unfused": (replace(WIDE, attention="unfused", qk_norm=True), {}),
    "experts": (EXPERTS_OF, {}),
    "fp8": (WIDE, {"training": {**FP8, "fp8": "tensorwise"}}),
    "post-norm": (POST_NORM, {}),
    "further tokens": (replace(WIDE, mtp_layers=2), {}),
}
PARTS = (("attention",), ("mlp",), ("norms",), ("attention", "mlp", "norms"), ("block",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
@pytest.mark.parametrize("name", BLOCKS)
def test_launches_of_recomputed_parts_are_declared(
    name: str, parts: tuple[str, ...], halves: bool, corpora: tuple[str, BertDataConfig]
) -> None:
    model, groups = BLOCKS[name]
    changes: dict[str, Any] = {
        "training": {"precision": "bf16"},
        **groups,
        "recompute": {"method": "full"} if parts == ("block",) else {"method": "selective", "parts": list(parts)},
        "schedule": {"name": "1f1b", "two_bp": halves},
    }
    if isinstance(model, BertModelConfig):
        config = make_bert_config(corpora[1], model, **changes)
    else:
        config = make_config(corpora[0], model, **changes)
    check_one_step(shortened(config, 2), ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_launches_of_recomputed_logits_count_chunks(
    model: str, corpora: tuple[str, BertDataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shortened(config_of({**BASE, "model": model, "tensor": "2", "recompute": "logits"}, *corpora), 2)
    costs._ops.cache_clear()
    monkeypatch.setattr(linear, "CHUNK_BYTES", 4 * config.model.vocabulary_size)
    check_one_step(config, ranks=2, chunk_bytes=linear.CHUNK_BYTES)
    costs._ops.cache_clear()
