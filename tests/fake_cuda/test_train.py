"""Training steps and evaluations on devices that are not there: no fault, and the host waits only where it may."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import MuonConfig
from megapipe.config.rope import RopeScaling
from megapipe.config.run import PretrainConfig
from tests.distributed.test_covering import CASES, name_of
from tests.fake_cuda import runs
from tests.fake_cuda.communicators import check_logs
from tests.fake_cuda.server import run_fake
from tests.support.bert_runs import MODERN, POST_NORM, make_bert_config, write_corpora
from tests.support.covering import Case
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config
from tests.support.layouts import OTHER_ORDERS, config_of, sizes_of, world_size
from tests.support.ranks import free_port

WIDE = replace(LLAMA_SHAPE, hidden_size=64)
"""Heads of 16 channels, as flash attention and flex_attention take them."""
DROPOUT = replace(GPT2_SHAPE, hidden_dropout=0.1, attention_dropout=0.1)
FP8 = {"precision": "bf16", "fp8_first_kept": 0, "fp8_last_kept": 0}
ISOLATED: dict[str, Any] = {"data": {"isolate_documents": True}}
EXPERTS_OF = replace(WIDE, num_experts=4)


def _scaled(kind: str, **fields: Any) -> RopeScaling:
    return RopeScaling(kind=kind, factor=2.0, original_length=16, **fields)


OPTIONS: dict[str, tuple[ModelConfig, dict[str, dict[str, Any]]]] = {
    "bf16": (WIDE, {}),
    "fp32": (WIDE, {"training": {"precision": "fp32"}}),
    "attention dropout": (DROPOUT, {}),
    "sliding window": (replace(WIDE, sliding_window=8), {}),
    "isolated documents": (WIDE, ISOLATED),
    "isolated documents in a window": (replace(WIDE, sliding_window=8), ISOLATED),
    "query and key norms": (replace(WIDE, qk_norm=True), {}),
    "fp8 tensorwise": (WIDE, {"training": {**FP8, "fp8": "tensorwise"}}),
    "fp8 rowwise": (WIDE, {"training": {**FP8, "fp8": "rowwise"}}),
    "muon": (WIDE, {"optimizer": {"name": "muon"}}),
    "experts": (replace(WIDE, num_experts=4), {}),
    "balanced experts": (replace(WIDE, num_experts=4, expert_balance_rate=0.001), {}),
    "no master weights": (WIDE, {"training": {"precision": "bf16", "master_weights": False}}),
    "deterministic": (WIDE, {"training": {"precision": "bf16", "deterministic": True}}),
    "flex": (replace(WIDE, attention="flex"), ISOLATED),
    "biases of queries alone": (replace(WIDE, bias="qkv"), {}),
    "no positions": (replace(WIDE, positions="none"), {}),
    "GELU of erf": (replace(GPT2_SHAPE, activation="gelu"), {}),
    "linear scaling": (replace(WIDE, rope_scaling=RopeScaling(kind="linear", factor=2.0)), {}),
    "Llama 3's scaling": (replace(WIDE, rope_scaling=RopeScaling(kind="llama3", factor=2.0)), {}),
    "experts balanced by scores": (replace(EXPERTS_OF, expert_bias="scores", expert_balance_rate=0.001), {}),
    "sgd": (WIDE, {"optimizer": {"name": "sgd"}}),
    "moments in bf16": (WIDE, {"optimizer": {"moment_dtype": "bf16"}}),
    "muon, spectral": (WIDE, {"optimizer": {"name": "muon", "muon": MuonConfig(scale="spectral")}}),
    "recomputed norms": (WIDE, {"recompute": {"method": "selective", "parts": ["norms"]}}),
    "eager updates": (WIDE, {"schedule": {"name": "2bw", "update": "eager"}, "parallel": {"pipeline": 2}}),
    "sums in bf16": (WIDE, {"parallel": {"data": 2}, "zero": {"stage": 2, "reduce_dtype": "bf16"}}),
    "post-norm BERT": (POST_NORM, {}),
    "ModernBERT": (MODERN, {}),
    **{
        f"{each} in the head": (replace(MODERN, transform_activation=each), {})
        for each in ("gelu", "gelu_tanh", "relu", "relu_squared", "silu")
    },
    "Gemma, NTK": (
        replace(WIDE, activation="geglu_tanh", normalization="rms_norm_unit_offset", rope_scaling=_scaled("dynamic")),
        {},
    ),
    "relu, biases of the MLP alone": (replace(GPT2_SHAPE, activation="relu", bias="mlp"), {}),
    "gated relu": (replace(WIDE, activation="reglu"), {}),
    "gated relu squared": (replace(WIDE, activation="reglu_squared"), {}),
    "silu, YaRN": (replace(WIDE, activation="silu", rope_scaling=_scaled("yarn")), {}),
    "LongRoPE": (replace(WIDE, rope_scaling=_scaled("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)), {}),
    "sinks in a window": (replace(WIDE, attention_sinks=True, sliding_window=8, activation="swiglu_clamped"), {}),
    "chunks": (replace(WIDE, attention_chunk_size=8), {}),
    "BLOOM": (replace(GPT2_SHAPE, positions="alibi", embedding_norm=True, norm_position="stream"), {}),
    "latents": (replace(WIDE, num_kv_heads=None, kv_latent_size=24, query_latent_size=32, rotary_head_size=8), {}),
    "further tokens": (replace(WIDE, mtp_layers=2), {"parallel": {"tensor": 2, "sequence": True}}),
    "experts of sigmoids": (replace(EXPERTS_OF, router_scores="sigmoid"), {}),
    **{
        f"{each} biases": (replace(EXPERTS_OF, shared_expert_size=32, bias=each), {})
        for each in ("shared", "attention_shared")
    },
    "slices": (
        replace(WIDE, max_positions=64, sliding_window=40),
        {
            "schedule": {"name": "seq1f1b", "slices": 3, "slice_split": "flops"},
            "data": {"sequence_length": 64},
            "parallel": {"pipeline": 2},
        },
    ),
    "shared output layer": (
        replace(WIDE, tie_embeddings=False, logit_softcap=3.0),
        {"parallel": {"pipeline": 2, "tensor": 2, "vocabulary": "pipeline"}},
    ),
    "shared output layer, second variant": (WIDE, {"parallel": {"pipeline": 2, "vocabulary": "pipeline_2"}}),
    **{name: (GPT2_SHAPE, {"schedule": {"name": name}, "parallel": {"pipeline": 2}}) for name in OTHER_ORDERS},
}
"""Name -> model, and what else is changed."""
FAST_OPTIONS = ("isolated documents", "experts")
MAY_WAIT = {
    # One read of losses, norm and flags at the end of a step; a thread waits for the sums of a schedule that never
    # flushes.
    "megapipe/engine/reductions.py": 2,
    "megapipe/engine/host_memory.py": 2,  # at the end of a section optimizer state is whole in host memory
}
"""Files that wait for the device in a step, and how often at most."""
EXPERTS = "megapipe/layers/feed_forward.py"
"""Waits for the device in each layer: experts have to know how many rows they get."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, BertDataConfig]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def config_with(name: str, prefix: str, data: BertDataConfig) -> PretrainConfig:
    """A small run in bf16 with one of `OPTIONS`."""
    model, groups = OPTIONS[name]
    changes = {"training": {"precision": "bf16"}, **groups}
    if isinstance(model, BertModelConfig):
        return make_bert_config(data if model.sentence_head else replace(data, pairs="none"), model, **changes)
    return make_config(prefix, model, **changes)


def shortened(config: PretrainConfig, microbatches: int = 4) -> PretrainConfig:
    """With few micro-batches a step and one step's samples to evaluate."""
    size = microbatches * (config.parallel.data or 1) * config.batch.micro_size
    evaluation = replace(config.evaluation, samples=size)
    return replace(config, batch=replace(config.batch, global_size=size), evaluation=evaluation)


def check(reports: list[runs.Report]) -> None:
    """No fault on any rank, exchanges that match, and one read of a step's results."""
    assert [report.faults for report in reports] == [[]] * len(reports)
    assert check_logs([report.log for report in reports]) == []
    for report in reports:
        waits = {place.split(":")[0]: times for place, times in waits_of(report, "step").items()}
        waits.pop(EXPERTS, None)
        assert all(times <= MAY_WAIT.get(place, 0) for place, times in waits.items()), waits
        assert waits_of(report, "load") == {}
        assert not any(result.stop or result.save or result.skipped for result in report.results[:-1])


def waits_of(report: runs.Report, phase: str) -> dict[str, int]:
    """Times that the host waited for the device, by place."""
    return {place: times for (_, place), times in report.phases[phase].syncs.items()}


@pytest.mark.parametrize(
    "name",
    [
        each if each in FAST_OPTIONS else pytest.param(each, marks=(pytest.mark.slow, pytest.mark.one_in(10)))
        for each in OPTIONS
    ],
)
def test_every_option_of_a_model_trains_without_a_fault(corpora: tuple[str, BertDataConfig], name: str) -> None:
    config = config_with(name, *corpora)
    config = shortened(config, 2 * (config.parallel.pipeline or 1))
    check(run_fake(runs.train, config, 2, True, ranks=prod(size or 1 for size in sizes_of(config).values())))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GPT2_SHAPE, LLAMA_SHAPE], ids=["gpt2", "llama"])
def test_compiled_blocks_are_one_graph_without_faults(
    corpora: tuple[str, BertDataConfig], shape: dict[str, Any]
) -> None:
    """As far as the graph: nothing can be compiled for a device that is not there."""
    reports = []
    for compile in (False, True):
        groups = {"training": {"precision": "bf16", "compile": compile}}
        reports += run_fake(runs.train, shortened(make_config(corpora[0], shape, **groups), 2), 2)
    check(reports)
    plain, captured = reports
    assert (plain.graphs, captured.graphs) == (0, 1)
    assert captured.phases["step"].syncs == plain.phases["step"].syncs


BACKENDS = {
    "cuda": {
        "layer_norm": {
            "layer_norm_forward",
            "layer_norm_backward",
            "softmax_forward",
            "softmax_input_gradient",
            "adamw",
        },
        "rms_norm": {"rms_norm_forward", "rms_norm_backward", "softmax_forward", "softmax_input_gradient", "adamw"},
    },
    "apex": {
        "layer_norm": {"forward_affine", "backward_affine"},
        "rms_norm": {"rms_forward_affine", "rms_backward_affine"},
    },
}
"""Backend and norm -> functions of the extension that a step calls."""
OF_APEX = {
    "forward",
    "backward",
    "multi_tensor_adam_capturable",
    "multi_tensor_l2norm",
    "wgrad_gemm_accum_fp32",
}
"""Functions of apex that a step calls with either norm."""


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extensions_train_with_calls_that_they_take(
    corpora: tuple[str, BertDataConfig], backend: str, norm: str
) -> None:
    """Attention that is not fused runs the softmax kernel: with attention dropout, and where it is requested."""
    model = replace(DROPOUT, max_positions=32) if norm == "layer_norm" else replace(WIDE, attention="unfused")
    ops = [norm, "softmax", "attention_probabilities", "adamw"]
    ops += ["gradient_norm", "weight_gradient"] if backend == "apex" else []
    config = make_config(
        corpora[0],
        model,
        data={"sequence_length": 32},
        batch={"micro_size": 2},
        training={"precision": "bf16"},
        kernels={"backends": dict.fromkeys(ops, backend)},
    )
    (report,) = run_fake(runs.train, shortened(config, 2))
    check([report])
    prefix = "csrc " if backend == "cuda" else "apex "
    called = {name.removeprefix(prefix) for name in report.phases["step"].launches if name.startswith(prefix)}
    assert called == BACKENDS[backend][norm] | (OF_APEX if backend == "apex" else set())


SMALL = [case for case in CASES if case["model"] == "llama" and case["context"] == "1" and world_size(case) > 1]
SLOW_CASES = [case for case in SMALL if case["tensor"] == "1"][:2]
SLOW_CASES += [case for case in SMALL if case["schedule"] == "2bw" and case not in SLOW_CASES][:1]


def marked(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow if case in SLOW_CASES else pytest.mark.exhaustive)


@pytest.mark.parametrize("case", [marked(case) for case in CASES], ids=name_of)
def test_every_pair_of_features_trains_without_a_fault(corpora: tuple[str, BertDataConfig], case: Case) -> None:
    config = shortened(config_of(case, *corpora))
    check(run_fake(runs.train, config, 2, True, ranks=world_size(case), timeout=300.0))


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
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
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
    for rehearsed, kinds in ((True, set()), (False, {"the first launch of", "needs more memory than ever before"})):
        reports = run_fake(runs.train, config, 2, False, None, rehearsed, ranks=2)
        faults = [fault for report in reports for fault in report.faults]
        assert {
            kind for kind in ("the first launch of", "needs more memory than ever before") if kind in str(faults)
        } == kinds
        assert all("while a receive is under way" in fault for fault in faults)
