"""Ernie 4.5 with experts in every layer (Baidu 2025). Biases that the loss does not train balance its experts."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import EXPERTS, QKV, ROUTER_OUTPUT, decoder, expert_names, rotary_fields
from megapipe.spec.family import FamilyError, Tensors, keys

_CONSTANTS = {
    "use_bias": False,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    last = config["moe_layer_end_index"]
    if last != -1 and last < config["num_hidden_layers"] - 1:
        raise FamilyError(
            f"moe_layer_end_index is {last}, so the layers after it have no experts; the model configuration has "
            "experts in every layer or in none"
        )
    return {}


decoder(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ffn_key="moe_intermediate_size",
    fields={"moe_num_experts": "num_experts", "moe_k": "experts_per_token"},
    needs={**EXPERTS, "expert_balance_rate": ModelConfig().expert_balance_rate, "expert_bias": "shares"},
    reads=keys("moe_layer_end_index"),
    more=(rotary_fields, _fields),
    writes={
        "intermediate_size": "ffn_hidden_size",
        "moe_layer_end_index": lambda model: model.num_layers - 1,
        **_CONSTANTS,
    },
    # intermediate_size is the width of layers without experts, of which there are none.
    ignored=ROUTER_OUTPUT | {"intermediate_size"},
    fixed={key: (value,) for key, value in _CONSTANTS.items()},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    tensors={
        "blocks.attention.qkv": QKV.then("rotary_pairs"),
        **expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
        "experts.mlp.router.bias": Tensors(
            ("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",), ("row",)
        ),
    },
)
