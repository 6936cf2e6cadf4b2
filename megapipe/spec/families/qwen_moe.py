"""Qwen2 and Qwen3 with experts (Yang et al. 2024, arXiv 2407.10671; 2025, arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.decoder_family import (
    ATTENTION_BIAS,
    ROUTER_OUTPUT,
    SLIDING,
    Fields,
    bias_fields,
    blocks,
    decoder,
    dense_size,
    expert_names,
    layer_fields,
    rotary_fields,
    with_additions,
)
from megapipe.spec.family import Family, FamilyError, Tensors, keys

_MLP = "model.layers.{layer}.mlp"


def _dense_layers(config: Mapping[str, Any]) -> Fields:
    """Return the fields of layers without experts: those of mlp_only_layers, and all but every decoder_sparse_step."""
    step, alone = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    number = config["num_hidden_layers"]
    dense = [index in alone or (index + 1) % step != 0 for index in range(number)]
    fields = {"num_experts": None, "ffn_hidden_size": config["intermediate_size"]}
    return layer_fields(["dense" if each else "base" for each in dense], {"dense": fields})


def _no_windows(config: Mapping[str, Any]) -> Fields:
    """Refuse windows, which transformers has in every second layer of Qwen2's mixtures and in all of Qwen3's."""
    if config.get("use_sliding_window") or SLIDING in (config.get("layer_types") or ()):
        raise FamilyError(
            "use_sliding_window or layer_types asks for windows, which megapipe does not have in models of this type"
        )
    return {}


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
        "reads": keys("use_sliding_window layer_types decoder_sparse_step mlp_only_layers intermediate_size"),
        "ignored": ROUTER_OUTPUT | keys("sliding_window max_window_layers"),
        "writes": {
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": _dense_numbers,
            "intermediate_size": dense_size,
        },
        "defaults": {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "tensors": expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    }
    merged = with_additions(entries, changes)
    return decoder(model_type, architecture, ffn_key="moe_intermediate_size", **merged, **changes)


_qwen(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fields={"shared_expert_intermediate_size": "shared_expert_size"},
    needs={"shared_expert_gate": True},
    reads=keys("qkv_bias"),
    more=(rotary_fields, _no_windows, _dense_layers, lambda config: {"bias": "qkv" if config["qkv_bias"] else "none"}),
    writes={"qkv_bias": lambda model: model.has_bias("attention.qkv")},
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    tensors={
        "experts.mlp.shared.up": Tensors(
            (f"{_MLP}.shared_expert.gate_proj", f"{_MLP}.shared_expert.up_proj"), ("stacked",)
        ),
        "experts.mlp.shared.down": f"{_MLP}.shared_expert.down_proj",
        "experts.mlp.shared.gate": f"{_MLP}.shared_expert_gate",
    },
)
_qwen(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    needs={"qk_norm": True},
    reads=keys("attention_bias"),
    more=(rotary_fields, _no_windows, _dense_layers, bias_fields),
    writes=ATTENTION_BIAS,
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
