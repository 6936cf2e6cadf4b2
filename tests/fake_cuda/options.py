"""Small runs on devices that are not there: models, options of each, and what must hold of every report."""

from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import MuonConfig
from megapipe.config.rope import RopeScaling
from megapipe.config.run import PretrainConfig
from tests.fake_cuda.communicators import check_logs
from tests.fake_cuda.runs import Report
from tests.support.bert_runs import MODERN, POST_NORM, make_bert_config, write_corpora
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config
from tests.support.layouts import OTHER_ORDERS

WIDE = replace(LLAMA_SHAPE, hidden_size=64)
"""Heads of 16 channels, as flash attention and flex_attention take them."""
DROPOUT = replace(GPT2_SHAPE, hidden_dropout=0.1, attention_dropout=0.1)
FP8 = {"precision": "bf16", "fp8_first_kept": 0, "fp8_last_kept": 0}
ISOLATED: dict[str, Any] = {"data": {"isolate_documents": True}}
SLICES = {"name": "seq1f1b", "slices": 3, "slice_split": "flops"}
STAGES: dict[str, Any] = {"parallel": {"pipeline": 2}}
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
    "recomputed norms": (DROPOUT, {"recompute": {"method": "selective", "parts": ["norms"]}}),
    "eager updates": (WIDE, {**STAGES, "schedule": {"name": "2bw", "update": "eager"}}),
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
        {**STAGES, "data": {"sequence_length": 64}, "schedule": SLICES},
    ),
    "shared output layer": (
        replace(WIDE, tie_embeddings=False, logit_softcap=3.0),
        {"parallel": {"pipeline": 2, "tensor": 2, "vocabulary": "pipeline"}},
    ),
    "shared output layer, second variant": (WIDE, {"parallel": {"pipeline": 2, "vocabulary": "pipeline_2"}}),
    **{name: (GPT2_SHAPE, {**STAGES, "schedule": {"name": name}}) for name in OTHER_ORDERS},
}
"""Name -> model, and what else is changed."""
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


def check(reports: list[Report]) -> None:
    """No fault on any rank, exchanges that match, and one read of a step's results."""
    assert [report.faults for report in reports] == [[]] * len(reports)
    assert check_logs([report.log for report in reports]) == []
    for report in reports:
        waits = {place.split(":")[0]: times for place, times in waits_of(report, "step").items()}
        waits.pop(EXPERTS, None)
        assert all(times <= MAY_WAIT.get(place, 0) for place, times in waits.items()), waits
        assert waits_of(report, "load") == {}
        assert not any(result.stop or result.save or result.skipped for result in report.results[:-1])


def waits_of(report: Report, phase: str) -> dict[str, int]:
    """Times that the host waited for the device, by place."""
    return {place: times for (_, place), times in report.phases[phase].syncs.items()}
