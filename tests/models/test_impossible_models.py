"""Fields of a model that do not go together are refused in one line, and forms that Megatron-LM's arguments lack."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.config.run import PretrainConfig
from megapipe.conversion.formats import TargetOptions
from megapipe.conversion.megatron_arguments import _fields, arguments_of
from tests.layers.bound import LATENTS, LLAMA, small_model

YARN, DYNAMIC = RopeScaling(kind="yarn"), RopeScaling(kind="dynamic", factor=2.0)
LONGROPE = RopeScaling(kind="longrope", short_factor=[1.0] * 4)
IN_CHUNKS, FURTHER = {**LLAMA, "attention_chunk_size": 5}, {**LLAMA, "mtp_layers": 1}
EXPERTS: dict[str, Any] = {**LLAMA, "num_experts": 8, "experts_per_token": 3, "ffn_hidden_size": 24}
UNIT_OFFSET = {"normalization": "rms_norm_unit_offset", "qk_norm": True, "qk_norm_over": "projection"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # Attention.
    (LLAMA, {"rotary_fraction": 0.4}, "rotates 3 of 8 channels; the number must be even and at least 2"),
    (LLAMA, {"positions": "none", "rotary_fraction": 0.5}, "rotary_fraction is 0.5 but model.positions is 'none'"),
    (LLAMA, {"attention_softcap": 5.0, "attention": "sdpa"}, "'sdpa' with model.attention_softcap 5.0; only unfused"),
    (LLAMA, {"attention_sinks": True, "attention": "flex"}, "'flex', which does not support model.attention_sinks; "),
    (LLAMA, {"positions": "alibi", "attention_softcap": 5.0}, "no limit; set model.attention_softcap to null"),
    (LLAMA, {"qk_norm_over": "projection"}, "'projection' but model.qk_norm is false; set model.qk_norm to true"),
    (LLAMA, {"rope_scaling": LONGROPE}, "long_factor has 0 numbers"),
    (LLAMA, {"rope_scaling": YARN, "rope_theta": 1.0}, "model.rope_theta is 1.0; it must be above 1"),
    (IN_CHUNKS, {"sliding_window": 4}, "model.sliding_window is 4 with model.attention_chunk_size 5"),
    (IN_CHUNKS, {"attention_dropout": 0.1}, "model.attention_dropout is 0.1 with model.attention_chunk_size 5"),
    (IN_CHUNKS, {"attention": "flex"}, "'flex', which does not support model.attention_chunk_size; set"),
    (LATENTS, {"kv_latent_size": None}, "model.rotary_head_size is 4 but model.kv_latent_size is null"),
    (LATENTS, {"rotary_head_size": None}, "rotary_head_size is null with model.kv_latent_size 12; set it to an even"),
    (LATENTS, {"rotary_head_size": 3}, "model.rotary_head_size is 3 with"),
    (LATENTS, {"value_head_size": 13}, "model.value_head_size is 13; it must be at most"),
    (LATENTS, {"num_kv_heads": 2}, "num_kv_heads is 2 with model.kv_latent_size 12; multi-latent attention needs"),
    (LATENTS, {"positions": "none"}, "model.positions is 'none'"),
    (LATENTS, {"rotary_fraction": 0.5}, "model.rotary_fraction is 0.5"),
    (LATENTS, {"qk_norm": True}, "model.qk_norm is True"),
    (LATENTS, {"bias": "qkv"}, "model.bias is 'qkv'"),
    # Blocks.
    ({}, {"norm_position": "post"}, "model.norm_position is 'post', which only a BERT has"),
    ({}, {"norm_position": "output", "parallel_residual": True}, "set model.norm_position to 'pre'"),
    ({}, {"swiglu_limit": 2.0}, "model.swiglu_limit is 2.0 with model.activation 'gelu'"),
    ({}, UNIT_OFFSET, "'projection', which has no norm with a unit offset"),
    (EXPERTS, {"router_groups": 3}, "model.router_groups 3 does not divide model.num_experts 8"),
    (EXPERTS, {"router_groups": 8, "router_scores": "sigmoid"}, "pick a divisor of 8 that is at most 4"),
    (EXPERTS, {"router_groups_chosen": 2}, "it must be at most model.router_groups 1"),
    (EXPERTS, {"router_groups": 4}, "of 2 experts each, must have model.experts_per_token 3"),
    (EXPERTS, {"router_scores": "sigmoid", "expert_bias": "scores"}, "set model.expert_bias to 'shares'"),
    (EXPERTS, {"shared_expert_gate": True}, "set model.shared_expert_size"),
    # Further tokens.
    (FURTHER, {"positions": "learned"}, "model.positions is 'learned' with model.mtp_layers 1, whose embeddings are"),
    (FURTHER, {"embedding_norm": True}, "set model.embedding_norm to None, or model.mtp_layers to 0"),
    (FURTHER, {"embedding_dropout": 0.1}, "set model.embedding_dropout to 0.0"),
]
"""Fields of a model, others that do not fit them, and a part of the message."""
REFUSED_IN_BERTS: list[tuple[dict[str, Any], str]] = [
    ({"norm_position": "sandwich"}, "model.norm_position is sandwich; it must be one of pre, post"),
    ({"parallel_residual": True}, "true with model.norm_position 'post'"),
    ({"logit_softcap": 2.0}, "model.logit_softcap is 2.0, but the head of a BERT has none"),
    ({"logit_scale": 2.0}, "set it to 1.0"),
    ({"mtp_layers": 1, "positions": "rotary"}, "only a GPT predicts further tokens"),
    ({"attention_chunk_size": 5}, "only a GPT attends in chunks"),
    ({**LATENTS, "activation": "gelu", "normalization": "layer_norm"}, "only a GPT has multi-latent attention"),
]


@pytest.mark.parametrize(
    ("model", "fields", "message"), REFUSED, ids=lambda part: part if isinstance(part, str) else ""
)
def test_impossible_fields_are_refused(model: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    (problem,) = small_model(**{**model, **fields}).problems()
    assert message in problem


@pytest.mark.parametrize(("fields", "message"), REFUSED_IN_BERTS, ids=str)
def test_a_bert_refuses_what_only_gpts_have(fields: dict[str, Any], message: str) -> None:
    (problem,) = BertModelConfig(**fields).problems()
    assert message in problem


def test_fp8_is_refused_with_latents() -> None:
    config = PretrainConfig(model=small_model(**LATENTS))
    config.training = replace(config.training, fp8="tensorwise", precision="bf16")
    assert any("model.kv_latent_size 12: multi-latent attention has no fp8" in each for each in config.problems())


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("activation", "geglu", {}),
        ("norm_position", "sandwich", {}),
        ("norm_position", "stream", {}),
        ("parallel_residual", True, {}),
        ("embedding_scale", 2.0, {}),
        ("residual_scale", 2.0, {}),
        ("logit_scale", 2.0, {}),
        ("logit_softcap", 2.0, {}),
        ("embedding_norm", True, {}),
        ("bias", "attention", {}),
        ("attention_scale", 0.5, {}),
        ("attention_softcap", 5.0, {}),
        ("attention_chunk_size", 4, {}),
        ("positions", "alibi", {}),
        ("qk_norm_over", "projection", {"qk_norm": True}),
        ("rotary_fraction", 0.5, {"rope_scaling": YARN}),
        ("rope_scaling.kind", "dynamic", {"rope_scaling": DYNAMIC}),
    ],
)
def test_megatron_refuses_forms_that_its_arguments_lack(name: str, value: Any, others: dict[str, Any]) -> None:
    fields = {**LLAMA, **others} if "." in name else {**LLAMA, **others, name: value}
    with pytest.raises(CheckpointError, match=rf"model\.{name} is {value}; Megatron-LM's arguments can express only"):
        arguments_of(contents(fields), TargetOptions(), torch.float32)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "rms_norm_unit_offset"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu", "relu_squared"])
def test_megatron_arguments_come_back_as_they_went(activation: str, norm: str) -> None:
    rotary = {"positions": "rotary", "rotary_fraction": 0.25}
    model = contents({"activation": activation, "normalization": norm, **rotary})
    fields = _fields(vars(arguments_of(model, TargetOptions(), torch.float32)), "gpt")
    assert (fields["activation"], fields["normalization"], fields["rotary_fraction"]) == (activation, norm, 0.25)


def contents(fields: dict[str, Any]) -> Any:
    return SimpleNamespace(model=ModelConfig(**fields), run=None)
