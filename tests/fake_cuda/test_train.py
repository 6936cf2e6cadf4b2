"""Training steps and evaluations on devices that are not there: no fault, the host waits only where it may, and every
rank launches the project's own kernels as often as the ops of the layers declare."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
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
from tests.distributed.test_covering import CASES, name_of
from tests.distributed.test_covering import OPTIONS as LAYOUTS_WITH_OPTIONS
from tests.fake_cuda import runs
from tests.fake_cuda.communicators import check_logs
from tests.fake_cuda.options import DROPOUT, EXPERTS_OF, FP8, OPTIONS, WIDE, check, config_with, corpora, shortened
from tests.fake_cuda.server import run_fake
from tests.support.bert_runs import POST_NORM, make_bert_config
from tests.support.covering import Case
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config
from tests.support.layouts import BASE, Change, config_of, sizes_of, world_size
from tests.support.ranks import free_port

__all__ = ["corpora"]

NORM = {
    "forward": {"norms": 1},
    "backward": {"norms_backward": 2},  # rows, and the sum of their parts of the weight's gradient
    "input half": {"norms_backward": 1},
    "weight half": {"norms_backward": 2},
}


def once(kernel: str) -> dict[str, dict[str, int]]:
    """Return the launches of an op with one kernel for each direction, whose weight half does nothing."""
    return {"forward": {kernel: 1}, "backward": {kernel: 1}, "input half": {kernel: 1}, "weight half": {}}


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


FAST_OPTIONS = ("isolated documents", "experts", "recomputed norms", "post-norm BERT")


@pytest.mark.parametrize(
    "name",
    [
        each if each in FAST_OPTIONS else pytest.param(each, marks=(pytest.mark.slow, pytest.mark.one_in(6)))
        for each in OPTIONS
    ],
)
def test_every_option_of_a_model_trains_without_a_fault(corpora: tuple[str, BertDataConfig], name: str) -> None:
    """With the launches of the project's kernels that are declared."""
    config = config_with(name, *corpora)
    check_run(shortened(config, 2 * (config.parallel.pipeline or 1)))


def check_run(config: PretrainConfig) -> None:
    """Check two steps and an evaluation, and the launches of the first step."""
    ranks = prod(size or 1 for size in sizes_of(config).values())
    reports = run_fake(runs.train, config, evaluate=True, ranks=ranks, timeout=300.0)
    check(reports)
    check_launches(config, reports)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GPT2_SHAPE, LLAMA_SHAPE], ids=["gpt2", "llama"])
def test_compiled_blocks_are_one_graph_without_faults(
    corpora: tuple[str, BertDataConfig], shape: dict[str, Any]
) -> None:
    """As far as the graph: nothing can be compiled for a device that is not there."""
    reports = []
    for compile in (False, True):
        groups = {"training": {"precision": "bf16", "compile": compile}}
        reports += run_fake(runs.train, shortened(make_config(corpora[0], shape, **groups), 2))
    check(reports)
    plain, captured = reports
    assert (plain.graphs, captured.graphs) == (0, 1)
    assert captured.phases["step"].syncs == plain.phases["step"].syncs


BACKENDS = {
    "cuda": {"softmax_forward", "softmax_input_gradient", "adamw"},
    "apex": {"forward", "backward", "wgrad_gemm_accum_fp32", "multi_tensor_adam_capturable", "multi_tensor_l2norm"},
}
"""Backend -> functions of the extension that a step calls with either norm."""
NORMS = {
    ("cuda", "layer_norm"): {"layer_norm_forward", "layer_norm_backward"},
    ("cuda", "rms_norm"): {"rms_norm_forward", "rms_norm_backward"},
    ("apex", "layer_norm"): {"forward_affine", "backward_affine"},
    ("apex", "rms_norm"): {"rms_forward_affine", "rms_backward_affine"},
}
"""Backend and norm -> the norm's functions."""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "norm"), NORMS)
def test_extensions_train_with_calls_that_they_take(
    corpora: tuple[str, BertDataConfig], backend: str, norm: str
) -> None:
    """Attention that is not fused runs the softmax kernel: with attention dropout, and where it is requested."""
    model = replace(DROPOUT, max_positions=32) if norm == "layer_norm" else replace(WIDE, attention="unfused")
    ops = [norm, "softmax", "attention_probabilities", "adamw"]
    ops += ["gradient_norm", "weight_gradient"] if backend == "apex" else []
    groups: dict[str, Any] = {"data": {"sequence_length": 32}, "batch": {"micro_size": 2}}
    groups |= {"training": {"precision": "bf16"}, "kernels": {"backends": dict.fromkeys(ops, backend)}}
    config = make_config(corpora[0], model, **groups)
    (report,) = run_fake(runs.train, shortened(config, 2))
    check([report])
    prefix = "csrc " if backend == "cuda" else "apex "
    called = {name.removeprefix(prefix) for name in report.phases["step"].launches if name.startswith(prefix)}
    assert called == BACKENDS[backend] | NORMS[backend, norm]


SMALL = [case for case in CASES if case["model"] == "llama" and case["context"] == "1" and world_size(case) > 1]
SLOW_CASES = [case for case in SMALL if case["tensor"] == "1"][:2]
SLOW_CASES += [case for case in SMALL if case["schedule"] == "2bw" and case not in SLOW_CASES][:1]


def marked(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow if case in SLOW_CASES else pytest.mark.exhaustive)


@pytest.mark.parametrize("case", [marked(case) for case in CASES], ids=name_of)
def test_every_pair_of_features_trains_without_a_fault(corpora: tuple[str, BertDataConfig], case: Case) -> None:
    check_run(shortened(config_of(case, *corpora)))


@pytest.mark.parametrize(
    ("replicas", "pipeline"), [(1, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (1, 2)))]
)
def test_a_run_is_saved_and_resumed_without_a_fault(
    corpora: tuple[str, BertDataConfig], tmp_path: Path, replicas: int, pipeline: int
) -> None:
    training = {"precision": "bf16", "steps": 4, "directory": str(tmp_path / "run"), "memory_check": "warn"}
    groups = {"training": training, "checkpoint": {"every": 2}}
    if replicas == 1:  # an evaluation awaits what the last update has gathered
        groups["evaluation"] = {"every": 2, "samples": 2}
    config = make_config(corpora[0], replace(WIDE, num_layers=pipeline), batch={"global_size": 2}, **groups)  # type: ignore[arg-type]
    config.parallel = replace(config.parallel, device="cuda", data=replicas, pipeline=pipeline)
    config.zero = replace(config.zero, stage=0 if replicas == 1 else 1)
    ranks = replicas * pipeline
    report, *others = run_fake(runs.pretrain_and_resume, config, free_port(), free_port(), ranks=ranks)
    assert [each.faults for each in (report, *others)] == [[]] * ranks
    assert report.results == [0, 0]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004"]
    reads = {place: times for (kind, place), times in report.phases["first start"].syncs.items() if kind == "tolist"}
    assert sum(times for place, times in reads.items() if "reductions.py" in place) == 2 + (pipeline > 1)
    # one a step, and one of a pipeline's rehearsal


@pytest.mark.parametrize(
    ("pipeline", "tensor"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_texts_are_generated_without_a_fault(pipeline: int, tensor: int) -> None:
    config = make_config("", replace(GPT2_SHAPE, max_positions=48), training={"precision": "bf16"})
    config.parallel = replace(config.parallel, pipeline=pipeline, tensor=tensor)
    reports = run_fake(runs.generate_texts, config, [[1, 2, 3], [4]], ranks=pipeline * tensor)
    assert [report.faults for report in reports] == [[]] * len(reports)
    assert check_logs([report.log for report in reports]) == []
    assert [report.results for report in reports] == [[[4, 4]]] * len(reports)


@pytest.mark.parametrize("schedule", ["zb_h1", pytest.param("pipedream", marks=pytest.mark.slow)])
def test_the_library_trains_any_modules_without_a_fault(schedule: str) -> None:
    reports = run_fake(runs.library, schedule, 2, ranks=2)
    assert [report.faults for report in reports] == [[], []]
    assert check_logs([report.log for report in reports]) == []


def test_rehearsals_load_kernels_and_memory_before_messages(corpora: tuple[str, BertDataConfig]) -> None:
    """The other tests see no fault because pipelines are rehearsed."""
    config = shortened(make_config(corpora[0], GPT2_SHAPE, training={"precision": "bf16"}), 2)
    config.parallel = replace(config.parallel, pipeline=2)
    kinds = {"the first launch of", "needs more memory than ever before"}
    for rehearsed, expected in ((True, set()), (False, kinds)):
        reports = run_fake(runs.train, config, rehearsed=rehearsed, ranks=2)
        faults = [fault for report in reports for fault in report.faults]
        assert {kind for kind in kinds if kind in str(faults)} == expected
        assert all("while a receive is under way" in fault for fault in faults)


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
