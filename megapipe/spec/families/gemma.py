"""Gemma 1 to 3, text (Gemma Team 2024, arXiv 2403.08295 and 2408.00118; 2025, arXiv 2503.19786)."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import (
    ATTENTION_BIAS,
    FULL,
    GATED,
    LAYER,
    SLIDING,
    WINDOWS,
    Fields,
    alternating,
    bias_fields,
    decoder,
    layer_types,
    rope_parameters,
    ropes_of_kinds,
    rotary_fields,
    windowed_layers,
    with_additions,
)
from megapipe.spec.family import OMITTED, Family, keys

_SANDWICH = {
    "blocks.attention_output_norm": f"{LAYER}.post_attention_layernorm",
    "blocks.mlp_norm": f"{LAYER}.pre_feedforward_layernorm",
    "blocks.mlp_output_norm": f"{LAYER}.post_feedforward_layernorm",
}


def _attention_scale(config: Mapping[str, Any]) -> Fields:
    return {"attention_scale": config["query_pre_attn_scalar"] ** -0.5}


def _query_scalar(model: ModelConfig) -> float:
    """Return the number whose square root divides the scores. It is a whole number in all published models."""
    scalar = model.head_dim if model.attention_scale is None else model.attention_scale**-2
    return round(scalar) if round(scalar) ** -0.5 == model.attention_scale else scalar


def _gemma(model_type: str, architecture: str, *more: Any, **changes: Any) -> Family:
    entries: dict[str, Any] = {
        "needs": {"normalization": "rms_norm_unit_offset"},
        "reads": keys("attention_bias"),
        "writes": ATTENTION_BIAS,
        "fixed": {"use_bidirectional_attention": (None, False)},
        "defaults": {"head_dim": 256, "tie_word_embeddings": True},
    }
    words = {"gelu_pytorch_tanh": "geglu_tanh", **GATED}
    # transformers reads "gelu" as the tanh form in the first Gemma, whose published files meant that.
    gelu = {"gelu": "geglu_tanh" if model_type == "gemma" else "geglu"}
    more = (lambda config: {"embedding_scale": config["hidden_size"] ** 0.5}, bias_fields, *more)
    return decoder(model_type, architecture, words=words | gelu, more=more, **with_additions(entries, changes))


_gemma(
    "gemma",
    "GemmaForCausalLM",
    rotary_fields,
    defaults={"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    # transformers reads hidden_act alone; the published files also have this key.
    fixed={"hidden_activation": (None, "gelu_pytorch_tanh")},
)
_SOFTCAPS: dict[str, Any] = {
    "activation": "hidden_activation",
    "fields": {"final_logit_softcapping": "logit_softcap"},
    "reads": keys("query_pre_attn_scalar sliding_window layer_types"),
    "tensors": _SANDWICH,
    "ignored": keys("hidden_act cache_implementation"),
}


_gemma(
    "gemma2",
    "Gemma2ForCausalLM",
    rotary_fields,
    _attention_scale,
    windowed_layers(alternating),
    **{**_SOFTCAPS, "fields": {**_SOFTCAPS["fields"], "attn_logit_softcapping": "attention_softcap"}},
    needs={"norm_position": "sandwich"},
    writes={**WINDOWS, "query_pre_attn_scalar": _query_scalar},
    defaults={
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)


def _gemma3_layers(config: Mapping[str, Any]) -> Fields:
    older = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    full, local = ropes_of_kinds(config, older, {"rope_theta": config["rope_local_base_freq"]})
    every = config["sliding_window_pattern"]
    numbers = range(1, config["num_hidden_layers"] + 1)
    types = [SLIDING if number % every else FULL for number in numbers]
    return {**full, **windowed_layers(lambda _: types, **local)(config)}


_gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _attention_scale,
    _gemma3_layers,
    **{**_SOFTCAPS, "reads": _SOFTCAPS["reads"] | keys("rope_local_base_freq sliding_window_pattern")},
    # transformers ignores this key in Gemma 3.
    fixed={"attn_logit_softcapping": (None,)},
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    needs={"norm_position": "sandwich", "qk_norm": True},
    writes={
        **WINDOWS,
        "query_pre_attn_scalar": _query_scalar,
        "rope_parameters": rope_parameters,
        "sliding_window_pattern": lambda model: [*layer_types(model), FULL].index(FULL) + 1,
        "rope_theta": OMITTED,
        "rope_scaling": OMITTED,
        "partial_rotary_factor": OMITTED,
    },
    defaults={
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
)
