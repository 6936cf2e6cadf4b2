"""Qwen2 and Qwen3 with experts (Yang et al. 2024, arXiv 2407.10671; 2025, arXiv 2505.09388)."""

from collections.abc import Callable, Mapping
from typing import Any

from megapipe.spec.decoder_family import (
    ATTENTION_BIAS,
    FULL,
    MLP,
    ROUTER_OUTPUT,
    SLIDING,
    Fields,
    bias_fields,
    blocks,
    decoder,
    dense_size,
    expert_names,
    gated_names,
    layer_fields,
    layer_types,
    listed_layers,
    rotary_fields,
    window_fields,
    window_of,
    with_additions,
)
from megapipe.spec.family import Family, FamilyError, keys


def _layers(default: Callable[[Mapping[str, Any]], list[str]]) -> Callable[[Mapping[str, Any]], Fields]:
    """Return a function for `Family.more` that reads which layers have windows and which have no experts. The latter
    are those in mlp_only_layers, and all but every decoder_sparse_step-th layer. default: returns the types of layers
    for a config.json without layer_types."""

    def fields(config: Mapping[str, Any]) -> Fields:
        step, alone = config["decoder_sparse_step"], config["mlp_only_layers"] or []
        number = config["num_hidden_layers"]
        window = window_fields(config)["sliding_window"] if config["use_sliding_window"] else None
        types = listed_layers(config, default)
        if SLIDING in types and not window:
            missing = "use_sliding_window or sliding_window"
            raise FamilyError(f"layer_types has {SLIDING!r}, but {missing} is not set")
        dense: Fields = {"num_experts": None, "ffn_hidden_size": config["intermediate_size"]}
        local: Fields = {"sliding_window": window}
        kinds = {"base": {}, "dense": dense, "local": local, "dense_local": dense | local}
        names = {(False, FULL): "base", (True, FULL): "dense", (False, SLIDING): "local"}
        without = [index in alone or (index + 1) % step != 0 for index in range(number)]
        return layer_fields([names.get(each, "dense_local") for each in zip(without, types, strict=True)], kinds)

    return fields


def _alternating(config: Mapping[str, Any]) -> list[str]:
    """Return the types of Qwen2's layers: every second layer among the first max_window_layers has a window."""
    first = config["max_window_layers"] if config["use_sliding_window"] else 0
    return [FULL if index % 2 or index >= first else SLIDING for index in range(config["num_hidden_layers"])]


def _alike(config: Mapping[str, Any]) -> list[str]:
    """Return the types of Qwen3's layers, which are all the same."""
    local = config["use_sliding_window"] and config["sliding_window"] is not None
    return [SLIDING if local else FULL] * config["num_hidden_layers"]


def _dense_numbers(model: Any) -> list[int]:
    return [index for index, each in enumerate(blocks(model)) if each.num_experts is None]


def _qwen(model_type: str, architecture: str, **changes: Any) -> Family:
    entries: dict[str, Any] = {
        "fields": {
            "num_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "norm_topk_prob": "normalize_expert_shares",
        },
        "needs": {"expert_balance_rate": 0.0},
        "reads": keys("use_sliding_window sliding_window decoder_sparse_step mlp_only_layers intermediate_size"),
        "ignored": ROUTER_OUTPUT,
        "writes": {
            "use_sliding_window": lambda model: window_of(model) is not None,
            "sliding_window": window_of,
            "decoder_sparse_step": 1,
            "mlp_only_layers": _dense_numbers,
            "intermediate_size": dense_size,
        },
        "defaults": {
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        "tensors": expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    }
    return decoder(model_type, architecture, ffn_key="moe_intermediate_size", **with_additions(entries, changes))


_qwen(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fields={"shared_expert_intermediate_size": "shared_expert_size"},
    needs={"shared_expert_gate": True},
    reads=keys("qkv_bias layer_types max_window_layers"),
    more=(rotary_fields, _layers(_alternating), lambda config: {"bias": "qkv" if config["qkv_bias"] else "none"}),
    writes={"qkv_bias": lambda model: model.has_bias("attention.qkv"), "layer_types": layer_types},
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    tensors={
        **gated_names("experts.mlp.shared", f"{MLP}.shared_expert"),
        "experts.mlp.shared.gate": f"{MLP}.shared_expert_gate",
    },
)
_qwen(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    needs={"qk_norm": True},
    reads=keys("attention_bias"),
    # transformers does not read these keys in this family.
    ignored=keys("layer_types max_window_layers"),
    more=(rotary_fields, lambda config: _layers(_alike)({**config, "layer_types": None}), bias_fields),
    writes=ATTENTION_BIAS,
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
