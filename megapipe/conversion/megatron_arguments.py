"""Megatron-LM's arguments, which its checkpoints contain, from and to the fields of our model configuration."""

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.field_types import Size, in_words, is_value_of
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling, yarn_growth
from megapipe.conversion.archive import InertObject
from megapipe.conversion.formats import Contents, TargetOptions
from megapipe.conversion.megapipe_format import model_of
from megapipe.conversion.megatron_model import (
    VOCABULARY_DIVISOR,
    kind_of_keys,
    models_of_layers,
    padded_rows,
    window_of,
)
from megapipe.layers.attention import EPSILON
from megapipe.layers.embedding import attention_factor
from megapipe.spec.decoder_family import layer_fields
from megapipe.spec.family import FamilyError, known_word

_UNSUPPORTED = (
    "experimental_attention_variant",
    "rotary_interleaved",
    "mtp_use_repeated_layer",
    "qk_l2_norm",
    "heterogeneous_layers_config_path",
    "no_rope_freq",
    "attention_output_gate",
)
_NOT_IN_BERT = (
    "multi_latent_attention",
    "num_experts",
    "qk_layernorm",
    "window_size",
    "mtp_num_layers",
    "quick_geglu",
    "enable_gpt_oss",
)
_UNSUPPORTED_EXPERTS = (
    "moe_expert_capacity_factor",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_router_force_load_balancing",
    "moe_router_topk_limited_devices",
)
"""Arguments that change what experts compute in a way that the model configuration cannot express."""
_NORMALIZATIONS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
_UNIT_OFFSET = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_ACTIVATIONS = {
    "swiglu": "swiglu",
    "squared_relu": "relu_squared",
    "openai_gelu": "gelu_tanh",
    "quick_geglu": "swiglu_clamped",
}
"""Our activation by the argument that selects it. See `_activation` if none of these arguments is set."""
_QUICK_GELU, _OFFSET = 1.702, 1.0
"""Factor of the gate in Megatron-LM's quick GELU, and the offset that `swiglu_clamped` adds to the other half."""
_POSITIONS = {"yarn": "rotary", "learned_absolute": "learned", "rope": "rotary", "none": "none"}
_LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
"""Constants of Megatron-LM's --use-rope-scaling."""


def described_model(
    saved: Any, origin: Path, keys: Iterable[str]
) -> tuple[ModelConfig, Mapping[str, Any], tuple[str, ...]]:
    """Return the model that a checkpoint describes, Megatron-LM's arguments, and lines about arguments that the model
    follows only in part.

    saved: the content of the file `origin`. keys: names of all tensors.

    Raises CheckpointError for missing arguments, and for a model that the model configuration cannot express.
    """
    described = saved.get("args") if isinstance(saved, dict) else None
    if not isinstance(described, InertObject) or not isinstance(described.state, dict):
        raise CheckpointError(f"{origin} contains no args, which describe the model")
    arguments, kind = described.state, kind_of_keys(keys)
    return _model(arguments, origin, kind), arguments, _notes(arguments, origin, kind)


def _model(arguments: Mapping[str, Any], origin: Path, kind: Literal["gpt", "bert"]) -> ModelConfig:
    """Return the model that Megatron-LM's arguments in the file `origin` describe. Raises CheckpointError."""
    for name, hint in (("num_layers", Size), ("mtp_num_layers", Size | None)):
        count = arguments.get(name) or None
        if not is_value_of(hint, count):
            raise CheckpointError(f"{origin}: {name} is {count!r}; it must be {in_words(hint)}")
    try:
        unsupported = _unsupported(arguments, kind)
        fields = {} if unsupported else _fields(arguments, kind)
    except FamilyError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{origin}: its arguments do not describe a model: {error!r}") from error
    if unsupported:
        raise CheckpointError(f"{origin}: {', '.join(unsupported)} is set, which a model configuration cannot express")
    return model_of(fields)


def _unsupported(arguments: Mapping[str, Any], kind: Literal["gpt", "bert"]) -> list[str]:
    """Return the arguments that the model configuration cannot express."""
    get = arguments.get
    unsupported = list(filter(get, _UNSUPPORTED))
    if get("normalization") != "RMSNorm":
        unsupported += [f"{name} without RMSNorm" for name in (*_UNIT_OFFSET, "qk_layernorm") if get(name)]
    softmax, limited = get("softmax_type", "vanilla"), get("activation_func_clamp_value")
    if softmax not in ("vanilla", "learnable") or (kind == "bert" and softmax != "vanilla"):
        unsupported.append(f"softmax_type {softmax}{' in a BERT' if kind == 'bert' else ''}")
    if get("quick_geglu") and not (limited and get("glu_linear_offset") == _OFFSET):
        unsupported.append(f"quick_geglu without activation_func_clamp_value and glu_linear_offset {_OFFSET}")
    elif get("swiglu") and (limited or get("glu_linear_offset")):
        unsupported.append("swiglu with activation_func_clamp_value or glu_linear_offset")
    if kind == "bert":
        unsupported += [f"{name} in a BERT" for name in _NOT_IN_BERT if get(name)]
        if _positions(arguments) != "learned_absolute":
            unsupported.append("position_embedding_type in a BERT")
    elif get("num_experts"):
        unsupported += _unsupported_experts(arguments)
    if get("multi_latent_attention"):
        unsupported += _unsupported_latents(arguments)
    if _windows_of_layers(arguments) is None:
        further = get("mtp_num_layers")
        rule = f" with mtp_num_layers {further} (its blocks must have the window of the last layer)" if further else ""
        unsupported.append(f"window_attn_skip_freq {arguments['window_attn_skip_freq']}{rule}")
    return unsupported


def _unsupported_experts(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of experts that the model configuration cannot express."""
    get = arguments.get
    unsupported = list(filter(get, _UNSUPPORTED_EXPERTS))
    if _experts_of_layers(arguments) is None:
        unsupported.append(f"moe_layer_freq {arguments['moe_layer_freq']}")
    balancing = get("moe_router_load_balancing_type")
    if balancing == "sinkhorn" or (isinstance(balancing, list) and "sinkhorn" in balancing):
        unsupported.append("moe_router_load_balancing_type sinkhorn")
    groups, chosen = get("moe_router_num_groups"), get("moe_router_group_topk")
    best = 2 if get("moe_router_score_function") == "sigmoid" else 1
    if chosen and chosen != groups and get("moe_router_topk", 2) // chosen != best:
        unsupported.append(f"moe_router_group_topk {chosen} (it must be moe_router_topk / {best})")
    return unsupported


def _experts_of_layers(arguments: Mapping[str, Any]) -> list[bool] | None:
    """Return for each layer whether it has experts. None for an impossible moe_layer_freq."""
    frequency, count = arguments.get("moe_layer_freq", 1), arguments["num_layers"]
    if isinstance(frequency, int) and frequency > 0:
        return [index % frequency == 0 for index in range(count)]
    if not isinstance(frequency, list) or len(frequency) != count or any(each not in (0, 1) for each in frequency):
        return None
    return [each == 1 for each in frequency]


def _windows_of_layers(arguments: Mapping[str, Any]) -> list[bool] | None:
    """Return for each layer whether it has the window. None for an impossible window_attn_skip_freq, or if blocks for
    multi-token prediction (MTP) differ from the last layer."""
    frequency, count = arguments.get("window_attn_skip_freq"), arguments["num_layers"]
    blocks = count + (arguments.get("mtp_num_layers") or 0)
    if frequency is None or not arguments.get("window_size"):
        windows = [bool(arguments.get("window_size"))] * blocks
    elif isinstance(frequency, int) and frequency > 0:
        windows = [number % frequency != 0 for number in range(1, blocks + 1)]
    elif isinstance(frequency, list) and len(frequency) >= blocks:
        windows = [bool(each) for each in frequency[:blocks]]
    else:
        return None
    return windows[:count] if len(set(windows[count - 1 :])) == 1 else None


def _fields_of_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe layers without experts, if other layers have experts, and layers with a
    window."""
    windows = _windows_of_layers(arguments) or []
    experts = (_experts_of_layers(arguments) if arguments.get("num_experts") else None) or [True] * len(windows)
    dense = {"num_experts": None, "ffn_hidden_size": arguments["ffn_hidden_size"]}
    local = {"sliding_window": arguments["window_size"][0] + 1} if any(windows) else {}
    kinds = [
        "_".join([*["dense"] * (not expert), *["local"] * window]) or "base"
        for expert, window in zip(experts, windows, strict=True)
    ]
    return layer_fields(kinds, {"dense": dense, "local": local, "dense_local": {**dense, **local}})


def _unsupported_latents(arguments: Mapping[str, Any]) -> list[str]:
    """Return the settings of multi-latent attention that the model configuration cannot express."""
    epsilon, positions = _epsilon(arguments), _positions(arguments)
    unsupported = {
        "without qk_layernorm": not arguments.get("qk_layernorm"),
        "with add_bias_linear": arguments.get("add_bias_linear", True),
        f"with norm_epsilon {epsilon} (it must be {EPSILON}, the epsilon of the norms of latents)": epsilon != EPSILON,
        f"with position_embedding_type {positions}": positions != "rope",
        f"with rotary_percent {arguments.get('rotary_percent')}": arguments.get("rotary_percent", 1.0) != 1.0,
    }
    return [f"multi_latent_attention {what}" for what, is_set in unsupported.items() if is_set]


def _positions(arguments: Mapping[str, Any]) -> str:
    if arguments.get("enable_gpt_oss"):
        return "yarn"
    return str(arguments.get("position_embedding_type", "learned_absolute"))


def _epsilon(arguments: Mapping[str, Any]) -> float:
    return float(arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)))


def _notes(arguments: Mapping[str, Any], origin: Path, kind: Literal["gpt", "bert"]) -> tuple[str, ...]:
    """Return lines about arguments in the file `origin` that the model follows only in part."""
    notes = []
    if kind == "bert" and _activation(arguments) == "gelu_tanh":
        notes.append(
            f"{origin}: Megatron-LM's masked-token head uses the exact GELU, and its layers "
            "use the approximation; here both use it, so logits differ by about 1e-3"
        )
    fused = arguments.get("bias_gelu_fusion") and not arguments.get("moe_grouped_gemm")
    if arguments.get("quick_geglu") and fused and arguments.get("add_bias_linear", True):
        notes.append(
            f"{origin}: with bias_gelu_fusion and without moe_grouped_gemm, Megatron-LM limits the inputs of "
            "quick_geglu before it adds the bias, megapipe after that, so that logits differ"
        )
    coefficient = arguments.get("moe_aux_loss_coeff")
    if arguments.get("num_experts") and any(coefficient if isinstance(coefficient, list) else [coefficient]):
        notes.append(
            f"{origin}: moe_aux_loss_coeff {coefficient} is not part of the model; megapipe "
            "balances experts by model.expert_balance_rate"
        )
    return tuple(notes)


def _activation(arguments: Mapping[str, Any]) -> str:
    biased = arguments.get("add_bias_linear", True)
    # The fused kernel approximates.
    gelu = "gelu_tanh" if arguments.get("bias_gelu_fusion") and biased else "gelu"
    return next((activation for argument, activation in _ACTIVATIONS.items() if arguments.get(argument)), gelu)


def _fields(arguments: Mapping[str, Any], kind: Literal["gpt", "bert"]) -> dict[str, Any]:
    get, positions = arguments.get, _positions(arguments)
    padded, vocabulary = arguments["padded_vocab_size"], get("vocab_size")
    heads = arguments["num_attention_heads"]
    bias = "all" if get("add_bias_linear", True) else "qkv" if get("add_qkv_bias") else "none"
    norm = known_word(_NORMALIZATIONS, get("normalization", "LayerNorm"))
    offset = "_unit_offset" if any(map(get, _UNIT_OFFSET)) else ""
    experts = get("num_experts") if kind == "gpt" else None
    width = get("moe_ffn_hidden_size") if experts else None
    fields = {
        "vocabulary_size": vocabulary if isinstance(vocabulary, int) and 0 < vocabulary <= padded else padded,
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": arguments["num_query_groups"] if get("group_query_attention") else heads,
        "head_size": get("kv_channels"),
        "ffn_hidden_size": width or arguments["ffn_hidden_size"],
        "max_positions": arguments["max_position_embeddings"],
        "normalization": norm + offset,
        "norm_epsilon": _epsilon(arguments),
        "activation": _activation(arguments),
        "positions": known_word(_POSITIONS, positions),
        "rotary_fraction": float(get("rotary_percent", 1.0)) if positions == "rope" else 1.0,
        "rope_theta": float(get("rotary_base", 10000)),
        "rope_scaling": _rope_scaling(arguments) if positions in ("rope", "yarn") else {},
        "bias": bias,
        "qk_norm": bool(get("qk_layernorm")),
        "tie_embeddings": not get("untie_embeddings_and_output_weights"),
    }
    if kind == "bert":
        pairs = bool(get("bert_binary_head", True))
        return {**fields, "norm_position": "pre", "token_types": 2 if pairs else 0, "sentence_head": pairs}
    fields["attention_sinks"] = arguments.get("softmax_type") == "learnable"
    if arguments.get("quick_geglu"):
        fields["swiglu_limit"] = float(arguments["activation_func_clamp_value"])
    if arguments.get("mtp_num_layers"):
        fields["mtp_layers"] = arguments["mtp_num_layers"]
        fields["mtp_loss_weight"] = float(arguments.get("mtp_loss_scaling_factor", 0.1))
    if arguments.get("multi_latent_attention"):
        fields |= _latent_fields(arguments)
    if experts:
        fields |= _expert_fields(arguments, bias)
    return {**fields, **_fields_of_layers(arguments)}


_LATENT_YARN = {
    "factor": "rotary_scaling_factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
"""Field of RopeScaling -> argument with multi-latent attention."""
_LATENT_DEFAULTS = {
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""Defaults of MLATransformerConfig, for arguments that a version of Megatron-LM does not have."""
_YARN = {
    **{name: f"yarn_{argument}" for name, argument in _LATENT_YARN.items()},
    "truncate": "yarn_correction_range_round_to_int",
}
"""Field of RopeScaling -> argument with other attention."""
_GPT_OSS = {
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 131072,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}
"""Constants of Megatron-LM's --enable-gpt-oss."""


def _yarn_fields(arguments: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Return the fields of YaRN.

    names: name of the argument for each field. prefix: start of the names of the arguments for mscale and
    mscale_all_dim.
    """
    scaling: dict[str, Any] = {"kind": "yarn", **{name: arguments[argument] for name, argument in names.items()}}
    factor = scaling["factor"] = float(scaling["factor"])
    mscale, all_dim = arguments.get(f"{prefix}mscale"), arguments.get(f"{prefix}mscale_all_dim")
    mscale, all_dim = (1.0, 0.0) if mscale is None or all_dim is None else (float(mscale), float(all_dim))
    if factor == 1:
        return {}
    if mscale and all_dim:
        scaling |= {"mscale": mscale, "mscale_all_dim": all_dim}
    elif mscale != 1 or all_dim:
        scaling["attention_factor"] = yarn_growth(factor, mscale) / yarn_growth(factor, all_dim)
    return scaling


def _latent_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of multi-latent attention, with the scale of scores that mscale_all_dim changes."""
    arguments = {**_LATENT_DEFAULTS, **arguments}
    unrotated, rotated = arguments["qk_head_dim"], arguments["qk_pos_emb_head_dim"]
    growth = yarn_growth(float(arguments["rotary_scaling_factor"]), float(arguments["mscale_all_dim"]))
    uses_yarn = (arguments.get("rope_type") or "yarn") == "yarn"
    default_scale: float = (unrotated + rotated) ** -0.5
    return {
        "num_kv_heads": arguments["num_attention_heads"],
        "head_size": unrotated,
        "kv_latent_size": arguments["kv_lora_rank"],
        "query_latent_size": arguments.get("q_lora_rank"),
        "rotary_head_size": rotated,
        "value_head_size": arguments["v_head_dim"],
        "bias": "none",
        "qk_norm": False,
        "rope_scaling": _yarn_fields(arguments, _LATENT_YARN) if uses_yarn else {},
        "attention_scale": None if growth == 1 else default_scale * growth * growth,
    }


def _expert_fields(arguments: Mapping[str, Any], bias: str) -> dict[str, Any]:
    get, balances = arguments.get, "moe_router_enable_expert_bias"
    topk, scores = get("moe_router_topk", 2), get("moe_router_score_function", "softmax")
    groups, chosen = get("moe_router_num_groups"), get("moe_router_group_topk")
    shared = get("moe_shared_expert_intermediate_size")
    normalizes = topk > 1 if scores == "sigmoid" else not get("moe_router_pre_softmax")
    rate = get("moe_router_bias_update_rate", 1e-3) if get(balances) else 0.0
    return {
        "num_experts": arguments["num_experts"],
        "experts_per_token": topk,
        "normalize_expert_shares": normalizes,
        "router_scores": scores,
        "router_scale": float(get("moe_router_topk_scaling_factor") or 1.0),
        "router_bias": bias == "all",
        "router_groups": groups if groups and chosen else 1,
        "router_groups_chosen": chosen if groups and chosen else 1,
        "expert_balance_rate": float(rate),
        "shared_expert_size": shared,
        "shared_expert_gate": bool(shared and get("moe_shared_expert_gate")),
    }


def _rope_scaling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if _positions(arguments) == "yarn":
        preset = _GPT_OSS if arguments.get("enable_gpt_oss") else {}
        set_arguments = {name: each for name, each in arguments.items() if each is not None}
        return _yarn_fields({**preset, **set_arguments}, _YARN, "yarn_")
    if arguments.get("use_rope_scaling"):
        return {"kind": "llama3", "factor": float(arguments.get("rope_scaling_factor", 8.0)), **_LLAMA3}
    if arguments.get("rotary_seq_len_interpolation_factor"):
        return {"kind": "linear", "factor": float(arguments["rotary_seq_len_interpolation_factor"])}
    return {}


def check_expressible(model: ModelConfig) -> None:
    """Raise CheckpointError for values of fields that Megatron-LM's arguments cannot express."""
    models_of_layers(model)
    for block in model.kinds_of_layers.values():
        for field, value, possible in _rules(block):
            if value not in possible:
                words = " or ".join("null" if each is None else str(each) for each in possible)
                raise CheckpointError(
                    f"model.{field} is {value}; Megatron-LM's arguments can express only "
                    f"{words}: write a Hugging Face folder instead (--to hf)"
                )


Rule = tuple[str, Any, tuple[Any, ...]]
"""A field, its value, and the values that Megatron-LM can express."""


def _rules(model: ModelConfig) -> list[Rule]:
    plain = model.head_dim**-0.5
    latent = model.kv_latent_size is not None
    scalings = ("none", "yarn") if latent else ("none", "linear", "llama3", "yarn")
    return [
        ("bias", model.bias, ("all", "qkv", "none")),
        ("rope_scaling.kind", model.rope_scaling.kind, scalings),
        *(_latent_rules(model) if latent else [("attention_scale", model.attention_scale, (None, plain))]),
        ("attention_softcap", model.attention_softcap, (None,)),
        ("attention_chunk_size", model.attention_chunk_size, (None,)),
        ("positions", model.positions, ("learned", "rotary", "none")),
        ("qk_norm_over", model.qk_norm_over, ("head",)),
        ("activation", model.activation, ("gelu", *_ACTIVATIONS.values())),
        ("swiglu_alpha", model.swiglu_alpha, (_QUICK_GELU,)),
        ("normalization", model.normalization, ("layer_norm", "rms_norm", "rms_norm_unit_offset")),
        ("norm_position", model.norm_position, ("pre",)),
        ("attention_norm", model.attention_norm, (True,)),
        ("parallel_residual", model.parallel_residual, (False,)),
        ("embedding_norm", model.embedding_norm, (None, False)),
        ("embedding_scale", model.embedding_scale, (1.0,)),
        ("residual_scale", model.residual_scale, (1.0,)),
        ("logit_scale", model.logit_scale, (1.0,)),
        ("logit_softcap", model.logit_softcap, (None,)),
        *_yarn_rules(model),
        *_bert_rules(model),
        *_expert_rules(model),
    ]


def _latent_rules(model: ModelConfig) -> list[Rule]:
    """Return (field, value, values that Megatron-LM's multi-latent attention can have)."""
    scaling, default_scale = model.rope_scaling, model.head_dim**-0.5
    growth = yarn_growth(scaling.factor, scaling.mscale_all_dim or 0.0) if scaling.kind == "yarn" else 1.0
    scale = default_scale * growth * growth
    is_close = math.isclose(model.score_scale, scale, rel_tol=1e-6)
    return [
        ("attention_scale", scale if is_close else model.attention_scale, (scale,)),
        ("bias", model.bias, ("none",)),
        ("norm_epsilon", model.norm_epsilon, (EPSILON,)),
        ("normalization", model.normalization, ("rms_norm", "rms_norm_unit_offset")),
        ("rope_scaling.truncate", scaling.truncate, (True,)),
    ]


def _yarn_rules(model: ModelConfig) -> list[Rule]:
    """Return (field, value, values that a model with YaRN can have)."""
    scaling = model.rope_scaling
    if scaling.kind != "yarn":
        return []
    fields: list[Rule] = [("rotary_fraction", model.rotary_fraction, (1.0,))]
    if scaling.factor <= 1:
        fields.append(("rope_scaling.attention_factor", attention_factor(scaling), (1.0,)))
    return fields


def _bert_rules(model: ModelConfig) -> list[Rule]:
    """Return (field, value, values that Megatron-LM's BERT can have)."""
    if not isinstance(model, BertModelConfig):
        return []
    return [
        # Megatron-LM's head has the exact GELU.
        ("activation", model.activation, ("gelu", "swiglu", "relu_squared")),
        ("transform_activation", model.transform_activation, (None, "gelu")),
        ("normalization", model.normalization, ("layer_norm",)),
        ("positions", model.positions, ("learned",)),
        ("first_position", model.first_position, (0,)),
        ("qk_norm", model.qk_norm, (False,)),
        ("sliding_window", model.sliding_window, (None,)),
        ("attention_sinks", model.attention_sinks, (False,)),
        ("transform_bias", model.transform_bias, (True,)),
        ("token_types", model.token_types, (2 if model.sentence_head else 0,)),
    ]


def _expert_rules(model: ModelConfig) -> list[Rule]:
    """Return (field, value, values that Megatron-LM's experts can have)."""
    if model.num_experts is None:
        return []
    sigmoid, chosen = model.router_scores == "sigmoid", model.router_groups_chosen
    fields: list[Rule] = [("router_bias", model.router_bias, (model.bias == "all",))]
    if sigmoid:  # Megatron-LM normalizes the shares of several experts
        fields.append(("normalize_expert_shares", model.normalize_expert_shares, (model.experts_per_token > 1,)))
    else:
        fields.append(("expert_balance_rate", model.expert_balance_rate if model.balances_experts else 0.0, (0.0,)))
    if model.bias == "all":
        fields.append(("shared_expert_size", model.shared_expert_size, (None,)))
    if chosen < model.router_groups:
        best = range(model.best_of_group * chosen, (model.best_of_group + 1) * chosen)
        fields.append(("experts_per_token", model.experts_per_token, tuple(best)))
    return fields


def _arguments_of_latents(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of multi-latent attention. kv_channels is the size of a value head, as core attention
    needs."""
    if model.kv_latent_size is None:
        return {"multi_latent_attention": False, "kv_channels": model.head_dim, "qk_layernorm": model.qk_norm}
    scaling = model.rope_scaling if model.rope_scaling.kind == "yarn" else RopeScaling()
    return {
        "multi_latent_attention": True,
        "kv_channels": model.value_dim,
        "qk_layernorm": True,
        "q_lora_rank": model.query_latent_size,
        "kv_lora_rank": model.kv_latent_size,
        "qk_head_dim": model.own_head_size,
        "qk_pos_emb_head_dim": model.rotary_dim,
        "v_head_dim": model.value_dim,
        "rope_type": "yarn" if scaling.kind == "yarn" else "rope",
        **_arguments_of_yarn(scaling, _LATENT_YARN),
    }


def _arguments_of_yarn(scaling: RopeScaling, names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Return the arguments of YaRN; see `_yarn_fields`."""
    mscale, all_dim = _yarn_weights(scaling)
    arguments = {argument: getattr(scaling, name) for name, argument in names.items()}
    return {**arguments, f"{prefix}mscale": mscale, f"{prefix}mscale_all_dim": all_dim}


def _yarn_weights(scaling: RopeScaling) -> tuple[float, float]:
    """Return mscale and mscale_all_dim. The quotient of their `yarn_growth` is the factor of cosines and sines."""
    mscale, all_dim, factor = scaling.mscale, scaling.mscale_all_dim or 0.0, scaling.factor
    if mscale and all_dim and scaling.attention_factor is None:
        return mscale, all_dim
    if factor <= 1 or (scaling.attention_factor is None and not all_dim):
        return 1.0, all_dim
    return (attention_factor(scaling) * yarn_growth(factor, all_dim) - 1.0) / (0.1 * math.log(factor)), all_dim


def _arguments_of_experts(model: ModelConfig, layers: list[int], options: TargetOptions) -> dict[str, Any]:
    """Return the arguments of experts.

    model: configuration of the layers with experts. layers: for each layer, 1 if it has experts, else 0.
    """
    if model.num_experts is None:
        return {"num_experts": None}
    limited = model.router_groups_chosen < model.router_groups
    return {
        "num_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_size,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_grouped_gemm": options.layer_names == "transformer_engine",
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.normalize_expert_shares and model.router_scores == "softmax",
        "moe_router_score_function": model.router_scores,
        "moe_router_topk_scaling_factor": None if model.router_scale == 1 else model.router_scale,
        "moe_router_num_groups": model.router_groups if limited else None,
        "moe_router_group_topk": model.router_groups_chosen if limited else None,
        "moe_router_enable_expert_bias": model.balances_experts,
        "moe_router_bias_update_rate": model.expert_balance_rate,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": model.shared_expert_size,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": options.tensor,
    }


def arguments_of(contents: Contents, options: TargetOptions, dtype: torch.dtype) -> Namespace:
    """Return the arguments that Megatron-LM compares with its command line, or uses with --use-checkpoint-args.

    Raises CheckpointError for a model that Megatron-LM's arguments cannot express.
    """
    whole = contents.model
    check_expressible(whole)
    models = models_of_layers(whole)
    layers = [int(each.num_experts is not None) for each in models]
    model, dense = models[layers.index(max(layers))], models[layers.index(min(layers))]
    scaling = model.rope_scaling
    if scaling.kind == "llama3" and any(getattr(scaling, name) != value for name, value in _LLAMA3.items()):
        raise CheckpointError(f"Megatron-LM's --use-rope-scaling always has {_LLAMA3}; this model has other values")
    if model.qk_norm and model.normalization == "layer_norm":
        raise CheckpointError(
            f"model.qk_norm with model.normalization {model.normalization} cannot be "
            "converted: Megatron-LM has one kind of norm; only rms norms can be converted"
        )
    run = contents.run
    window, windows = window_of(whole), [int(bool(each.sliding_window)) for each in models]
    yarn = scaling.kind == "yarn" and model.kv_latent_size is None
    clamped = model.activation == "swiglu_clamped"
    reverse = {choice: argument for argument, choice in (_NORMALIZATIONS | _POSITIONS).items()}
    return Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=dense.ffn_size,
        num_attention_heads=model.num_heads,
        group_query_attention=model.kv_heads != model.num_heads,
        num_query_groups=model.kv_heads,
        seq_length=model.max_positions,
        max_position_embeddings=model.max_positions,
        position_embedding_type="yarn" if yarn else reverse[model.positions],
        add_position_embedding=model.positions == "learned",
        use_rotary_position_embeddings=model.positions == "rotary" and not yarn,
        rotary_base=int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        rotary_percent=model.rotary_fraction,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=scaling.factor if scaling.kind == "linear" else None,
        use_rope_scaling=scaling.kind == "llama3",
        rope_scaling_factor=scaling.factor if scaling.kind == "llama3" else 8.0,
        normalization=reverse[model.normalization.removesuffix("_unit_offset")],
        norm_epsilon=model.norm_epsilon,
        apply_layernorm_1p=model.normalization == "rms_norm_unit_offset",
        **{argument: model.activation == activation for argument, activation in _ACTIVATIONS.items()},
        activation_func_clamp_value=model.swiglu_limit if clamped else None,
        glu_linear_offset=_OFFSET if clamped else 0.0,
        bias_gelu_fusion=False,
        add_bias_linear=model.bias == "all",
        add_qkv_bias=model.bias != "none",
        softmax_type="learnable" if model.attention_sinks else "vanilla",
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=windows + windows[-1:] * whole.mtp_layers if window and 0 in windows else None,
        mtp_num_layers=whole.mtp_layers or None,
        mtp_loss_scaling_factor=whole.mtp_loss_weight,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        vocab_size=model.vocabulary_size,
        padded_vocab_size=padded_rows(model, options.tensor),
        make_vocab_size_divisible_by=VOCABULARY_DIVISOR,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
        **(_arguments_of_yarn(scaling, _YARN, "yarn_") if yarn else {}),
        **_arguments_of_latents(model),
        **_arguments_of_experts(model, layers, options),
        **({"bert_binary_head": model.sentence_head} if isinstance(model, BertModelConfig) else {}),
        params_dtype=dtype,
        iteration=0 if run is None else run.step,
        consumed_train_samples=0 if run is None else run.consumed_samples,
        consumed_valid_samples=0,
    )
