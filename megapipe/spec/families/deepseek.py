"""DeepSeek-V2 and V3 (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437): multi-latent attention, and experts after
the first blocks."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.config.rope import yarn_growth
from megapipe.spec.decoder_family import (
    ATTENTION,
    ATTENTION_BIAS,
    LAYER,
    MLP,
    ROUTER_OUTPUT,
    UNUSED_BIASES,
    Fields,
    bias_fields,
    blocks,
    decoder,
    dense_size,
    described_rope,
    expert_names,
    gated_names,
    layer_fields,
    num_shared,
    rotary_fields,
    with_additions,
)
from megapipe.spec.family import OMITTED, Family, FamilyError, Tensors, keys

_LATENT_NAMES: dict[str, str | Tensors] = {
    "blocks.attention.query": Tensors((f"{ATTENTION}.q_proj",), ("rotary_last",)),
    "blocks.attention.query_down": f"{ATTENTION}.q_a_proj",
    "blocks.attention.query_latent_norm": f"{ATTENTION}.q_a_layernorm",
    "blocks.attention.query_up": Tensors((f"{ATTENTION}.q_b_proj",), ("rotary_last",)),
    "blocks.attention.kv_down": Tensors((f"{ATTENTION}.kv_a_proj_with_mqa",), ("rotary_last",)),
    "blocks.attention.kv_latent_norm": f"{ATTENTION}.kv_a_layernorm",
    "blocks.attention.kv_up": f"{ATTENTION}.kv_b_proj",
}
_EXPERT_NAMES: dict[str, str | Tensors] = {
    **expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    **gated_names("experts.mlp.shared", f"{MLP}.shared_experts"),
    "experts.mlp.router.bias": Tensors((f"{MLP}.gate.e_score_correction_bias",)),
}


def _rotary_fields(config: Mapping[str, Any]) -> Fields:
    """Return the fields of rotary positions, and the scale of scores that YaRN's mscale_all_dim changes."""
    unrotated, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    for key, size in (("head_dim", rotated), ("qk_head_dim", unrotated + rotated)):
        if config.get(key) not in (None, size):
            raise FamilyError(f"{key} is {config[key]!r}; in models of this type it is {size}")
    fields = rotary_fields(config)
    weight = described_rope(config).get("mscale_all_dim")
    if fields["rope_scaling.kind"] == "none" or not weight:
        return fields
    if "rope_scaling.factor" not in fields:
        raise FamilyError("the rotary parameters have mscale_all_dim but lack 'factor'")
    grown = yarn_growth(fields["rope_scaling.factor"], weight)
    plain: float = (unrotated + rotated) ** -0.5
    return {**fields, "attention_scale": plain * grown * grown}


def _layers(config: Mapping[str, Any]) -> Fields:
    """Return the fields of the first layers, which have no experts, and of the other layers: the total width of their
    shared experts, and their biases, which routed experts lack."""
    first, number = config["first_k_dense_replace"], config["num_hidden_layers"]
    shared = config["n_shared_experts"]
    if not isinstance(shared, int) or shared < 1:
        raise FamilyError(f"n_shared_experts is {shared!r}; it must be a whole number above 0")
    fields = {"num_experts": None, "ffn_hidden_size": config["intermediate_size"]}
    bias = bias_fields(config)["bias"]
    shared_bias = {"all": "attention_shared", "mlp": "shared"}.get(bias, bias)
    if shared_bias != bias:
        fields["bias"] = bias
    return {
        "shared_expert_size": shared * config["moe_intermediate_size"],
        "bias": shared_bias,
        **layer_fields(["dense" if index < first else "base" for index in range(number)], {"dense": fields}),
    }


def _groups(config: Mapping[str, Any]) -> Fields:
    """Return the groups of experts of DeepSeek-V2."""
    method = config["topk_method"]
    if method == "greedy":
        return {"router_groups": 1, "router_groups_chosen": 1}
    if method != "group_limited_greedy":
        raise FamilyError(f"topk_method is {method!r}; supported are greedy and group_limited_greedy")
    return {"router_groups": config["n_group"], "router_groups_chosen": config["topk_group"]}


def _num_dense(model: ModelConfig) -> int:
    return sum(each.num_experts is None for each in blocks(model))


def _grouped(model: ModelConfig, value: Any, otherwise: Any) -> Any:
    return value if model.router_groups > 1 else otherwise


def _deepseek(model_type: str, architecture: str, *more: Any, **changes: Any) -> Family:
    entries: dict[str, Any] = {
        "fields": {
            "q_lora_rank": "query_latent_size",
            "kv_lora_rank": "kv_latent_size",
            "qk_rope_head_dim": "rotary_head_size",
            "v_head_dim": "value_head_size",
            "n_routed_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "routed_scaling_factor": "router_scale",
        },
        "reads": keys(
            "attention_bias head_dim qk_head_dim first_k_dense_replace n_shared_experts "
            "intermediate_size n_group topk_group"
        ),
        "writes": {
            **ATTENTION_BIAS,
            "head_dim": "rotary_head_size",
            "first_k_dense_replace": _num_dense,
            # At least 1, also for a model without experts.
            "n_shared_experts": lambda model: max(1, num_shared(model)),
            "intermediate_size": dense_size,
        },
        "ignored": ROUTER_OUTPUT | keys("ep_size aux_loss_alpha seq_aux"),
        "fixed": {"moe_layer_freq": (1,)},
        "defaults": {
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        "tensors": _LATENT_NAMES | _EXPERT_NAMES,
    }
    return decoder(
        model_type,
        architecture,
        ffn_key="moe_intermediate_size",
        head_key="qk_nope_head_dim",
        more=(_rotary_fields, _layers, *more),
        **with_additions(entries, changes),
    )


_deepseek(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _groups,
    needs={"expert_balance_rate": 0.0, "normalize_expert_shares": False},
    reads=keys("topk_method mlp_bias"),
    writes={
        "mlp_bias": lambda model: model.has_bias("mlp.shared.up"),
        "topk_method": lambda model: _grouped(model, "group_limited_greedy", "greedy"),
        "n_group": lambda model: _grouped(model, model.router_groups, OMITTED),
        "topk_group": lambda model: _grouped(model, model.router_groups_chosen, OMITTED),
    },
    fixed={"norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    defaults={
        "first_k_dense_replace": 0,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
    },
)
_deepseek(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fields={
        "n_group": "router_groups",
        "topk_group": "router_groups_chosen",
        "norm_topk_prob": "normalize_expert_shares",
    },
    needs={
        "expert_balance_rate": ModelConfig().expert_balance_rate,
        "expert_bias": "shares",
        "router_scores": "sigmoid",
    },
    # transformers' model ignores the layers that predict further tokens.
    ignored=keys("num_nextn_predict_layers num_mtp_layers"),
    writes={"num_nextn_predict_layers": lambda model: model.mtp_layers},
    more_layers=True,
    mtp={
        "embedding_norm": f"{LAYER}.enorm",
        "hidden_norm": f"{LAYER}.hnorm",
        "projection": f"{LAYER}.eh_proj",
        "norm": f"{LAYER}.shared_head.norm",
    },
    buffers=UNUSED_BIASES,
    fixed={"rope_interleave": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    defaults={
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)
