"""gpt-oss (Agarwal et al. 2025, arXiv 2508.10925): attention sinks, windows in every second layer, experts whose
matrices all have biases. Files have the experts of a layer in one tensor, with their input on the axis before the last
one, and with a row of the gate before each row of `up`."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import (
    ATTENTION_BIAS,
    EXPERTS,
    LAYER,
    ROUTER_OUTPUT,
    WINDOWS,
    Fields,
    all_rotated,
    alternating,
    decoder,
    described_rope,
    rope_scaling,
    stretched,
    windowed_layers,
)
from megapipe.spec.family import OMITTED, Tensors, keys

_EXPERTS = f"{LAYER}.mlp.experts"
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""The rotary parameters of a config.json without any."""


def _rotary(config: Mapping[str, Any]) -> Fields:
    return all_rotated(stretched(described_rope(config) or _ROPE, config))


def _rope_scaling(model: ModelConfig) -> Fields:
    """Return rotary parameters, also for a model without scaling, because transformers' default has scaling."""
    return rope_scaling(model) or {"rope_type": "default"}


def _biases(config: Mapping[str, Any]) -> Fields:
    return {"bias": "all" if config["attention_bias"] else "mlp"}


decoder(
    "gpt_oss",
    "GptOssForCausalLM",
    fields={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    },
    aliases={"num_experts": "num_local_experts"},
    # hidden_act is not read: the activation is always this one.
    activation="activation_function",
    words={"swiglu_clamped": "swiglu_clamped"},
    needs={**EXPERTS, "attention_sinks": True, "router_bias": True},
    reads=keys("attention_bias sliding_window layer_types"),
    more=(_rotary, _biases, windowed_layers(alternating)),
    writes={
        "rope_scaling": _rope_scaling,
        **WINDOWS,
        **ATTENTION_BIAS,
        "hidden_act": "silu",
        "activation_function": OMITTED,
    },
    # The published files repeat two sizes under the names that OpenAI's own program reads.
    ignored=ROUTER_OUTPUT | keys("initial_context_length experts_per_token hidden_act"),
    defaults={
        "activation_function": "swiglu_clamped",
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    tensors={
        "blocks.attention.sinks.weight": f"{LAYER}.self_attn.sinks",
        "experts.mlp.router": f"{LAYER}.mlp.router",
        "experts.mlp.router.score_bias": f"{LAYER}.mlp.router.bias",
        "experts.mlp.up.weight": Tensors((f"{_EXPERTS}.gate_up_proj",), ("input_first", "interleaved")),
        "experts.mlp.up.bias": Tensors((f"{_EXPERTS}.gate_up_proj_bias",), ("interleaved",)),
        "experts.mlp.down.weight": Tensors((f"{_EXPERTS}.down_proj",), ("input_first",)),
        "experts.mlp.down.bias": Tensors((f"{_EXPERTS}.down_proj_bias",), ("input_first",)),
    },
)
