"""Ernie 4.5 with experts (Baidu 2025). Biases that the loss does not train balance its experts."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import (
    EXPERTS,
    MLP,
    QKV,
    ROUTER_OUTPUT,
    UNUSED_BIASES,
    Fields,
    blocks,
    decoder,
    dense_size,
    expert_names,
    gated_names,
    layer_fields,
    num_shared,
    rotary_fields,
)
from megapipe.spec.family import Tensors, keys

_CONSTANTS = {"use_bias": False, "moe_norm_min": 1e-12}


def _layers(config: Mapping[str, Any]) -> Fields:
    """Return the fields of layers without experts, and the width of all shared experts."""
    first, last, every = (config[f"moe_layer_{key}"] for key in ("start_index", "end_index", "interval"))
    number, shared = config["num_hidden_layers"], config["moe_num_shared_experts"]
    last = number - 1 if last == -1 else last
    dense = [not first <= index <= last or (index + 1) % every != 0 for index in range(number)]
    fields = {"num_experts": None, "ffn_hidden_size": config["intermediate_size"]}
    return {
        "shared_expert_size": shared * config["moe_intermediate_size"] if shared else None,
        **layer_fields(["dense" if each else "base" for each in dense], {"dense": fields}),
    }


def _with_experts(model: ModelConfig) -> list[int]:
    return [index for index, each in enumerate(blocks(model)) if each.num_experts is not None] or [model.num_layers]


def _intervals(model: ModelConfig) -> list[int]:
    return [after - before for before, after in pairwise(_with_experts(model))]


decoder(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ffn_key="moe_intermediate_size",
    fields={"moe_num_experts": "num_experts", "moe_k": "experts_per_token"},
    needs={**EXPERTS, "expert_balance_rate": ModelConfig().expert_balance_rate, "expert_bias": "shares"},
    reads=keys(
        "intermediate_size moe_layer_start_index moe_layer_end_index moe_layer_interval moe_num_shared_experts"
    ),
    more=(rotary_fields, _layers),
    writes={
        "intermediate_size": dense_size,
        "moe_layer_start_index": lambda model: _with_experts(model)[0],
        "moe_layer_end_index": lambda model: _with_experts(model)[-1],
        "moe_layer_interval": lambda model: ([1, *_intervals(model)])[-1],
        "moe_num_shared_experts": num_shared,
        **_CONSTANTS,
    },
    ignored=ROUTER_OUTPUT,
    fixed={key: (value,) for key, value in _CONSTANTS.items()},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 12288,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    tensors={
        "blocks.attention.qkv": QKV.then("rotary_pairs"),
        **expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
        **gated_names("experts.mlp.shared", f"{MLP}.shared_experts"),
        "experts.mlp.router.bias": Tensors((f"{MLP}.moe_statics.e_score_correction_bias",), ("row",)),
    },
    buffers=UNUSED_BIASES,
)
