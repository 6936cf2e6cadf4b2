"""A Hugging Face config.json told in the terms of our model configuration."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from megapipe.checkpoint.errors import CheckpointError
from megapipe.config.model import ModelConfig
from megapipe.models.gpt_hugging_face import Family

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that `model_type` names. Raises CheckpointError for one that this model cannot express."""
    known = get_args(Family)
    if config.get("model_type") not in known:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} is none that initial weights can be taken from; "
            f"these can: {', '.join(known)}"
        )
    family: Family = config["model_type"]
    return family


def model_fields(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Field of ModelConfig -> the value that these weights need, optional sizes resolved.

    tensors: names in the weight files, which tell tied embeddings where the config does not.
    Raises CheckpointError for a variant that the model configuration has no words for.
    """
    family = family_of(config)
    found = _gpt2_fields(config) if family == "gpt2" else _decoder_fields(config, family)
    default = family == "gpt2" or "lm_head.weight" not in tensors
    return {
        "vocabulary_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", default),
        **found,
    }


def field_differences(model: ModelConfig, wanted: Mapping[str, Any]) -> list[str]:
    """Fields of `model` that are not as `wanted`, one message each."""
    found = {
        **vars(model),
        "num_kv_heads": model.kv_heads,
        "head_size": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        **{f"rope_scaling.{name}": value for name, value in vars(model.rope_scaling).items()},
    }
    if "sliding_window" in wanted:
        window = _effective(wanted["sliding_window"], model)
        wanted = {**wanted, "sliding_window": window}
        found["sliding_window"] = _effective(model.sliding_window, model)
    return [
        f"set model.{name} to {value!r} (it is {found[name]!r})"
        for name, value in wanted.items()
        if found[name] != value
    ]


def _effective(window: int | None, model: ModelConfig) -> int | None:
    """A window as long as the longest sequence hides nothing."""
    return None if window is None or window >= model.max_positions else window


def _gpt2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(flag):
            raise CheckpointError(f"{flag} is set, for which the model configuration has no field")
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "head_size": config["n_embd"] // config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "max_positions": config["n_positions"],
        "normalization": "layer_norm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": _known(_GELU, config.get("activation_function", "gelu_new")),
        "positions": "learned",
        "bias": "all",
        "qk_norm": False,
        "sliding_window": None,
        "num_experts": None,
    }


def _decoder_fields(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    for flag in ("mlp_bias", "attention_bias"):
        if config.get(flag):
            raise CheckpointError(f"{flag} is set, for which the model configuration has no field")
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "normalization": "rms_norm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": _known({"silu": "swiglu", "swish": "swiglu"}, config.get("hidden_act", "silu")),
        "positions": "rotary",
        **_rotary_fields(config),
        "bias": "qkv" if family == "qwen2" else "none",
        "qk_norm": family == "qwen3",
        "sliding_window": _window(config, family),
        **(_mixtral_fields(config) if family == "mixtral" else {"num_experts": None}),
    }


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Loads are evened out by an auxiliary loss there: its router has no bias."""
    if config.get("router_jitter_noise"):
        raise CheckpointError("router_jitter_noise is set, for which the model configuration has no field")
    return {
        "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "normalize_expert_shares": True,
        "expert_balance_rate": 0.0,
    }


def _rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Older files have rope_theta beside rope_scaling, newer ones both in rope_parameters."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {**found, "rope_scaling.kind": "none"}
    found |= {"rope_scaling.kind": _known({"linear": "linear", "llama3": "llama3"}, kind)}
    found |= {"rope_scaling.factor": rope["factor"]}
    if kind == "llama3":
        found |= {
            "rope_scaling.low_frequency_factor": rope["low_freq_factor"],
            "rope_scaling.high_frequency_factor": rope["high_freq_factor"],
            "rope_scaling.original_length": rope["original_max_position_embeddings"],
        }
    return found


def _window(config: Mapping[str, Any], family: Family) -> int | None:
    """Qwen files give a window that only `use_sliding_window` turns on, and then for some layers alone."""
    if family in ("mistral", "mixtral"):
        window: int | None = config.get("sliding_window")
        return window
    if config.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window is set; windows that differ by layer have no field")
    return None


def _known(words: Mapping[str, str], word: str) -> str:
    if word not in words:
        raise CheckpointError(f"{word!r} is not supported; known are {', '.join(words)}")
    return words[word]
