"""The fields of our model configuration that a Hugging Face config.json gives."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_keys import known_config
from megapipe.config.model import ModelConfig
from megapipe.models.gpt_hugging_face import Family

_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
)
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that `model_type` names. Raises CheckpointError for one that this model cannot express."""
    known = get_args(Family)
    if config.get("model_type") not in known:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} is not supported; initial weights can be taken from "
            f"{', '.join(known)}"
        )
    family: Family = config["model_type"]
    return family


def model_fields(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Field of ModelConfig -> the value that these weights need, optional sizes resolved.

    tensors: names in the weight files; they decide whether embeddings are tied where the config does not.
    Raises CheckpointError for a variant that the model configuration cannot express.
    """
    family = family_of(config)
    config = known_config(config)
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
    if wanted.get("expert_balance_rate") and model.expert_balance_rate:
        found["expert_balance_rate"] = wanted["expert_balance_rate"]  # any rate: it is the training's, not the model's
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
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["moe_intermediate_size" if family == "ernie4_5_moe" else "intermediate_size"],
        "normalization": "rms_norm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": _known({"silu": "swiglu", "swish": "swiglu"}, config.get("hidden_act", "silu")),
        "positions": "rotary",
        **_rotary_fields(config),
        "bias": "qkv" if family == "qwen2" else "none",
        "qk_norm": family == "qwen3",
        "sliding_window": _window(config, family),
        **_expert_fields(config, family),
    }


def _expert_fields(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Mixtral balances its experts by an auxiliary loss: its router has no bias. Ernie 4.5 has biases as ours."""
    if family == "mixtral":
        return {
            "num_experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "normalize_expert_shares": True,
            "expert_balance_rate": 0.0,
        }
    if family != "ernie4_5_moe":
        return {"num_experts": None}
    last = config["moe_layer_end_index"]
    if last != -1 and last < config["num_hidden_layers"] - 1:
        raise CheckpointError(
            f"moe_layer_end_index is {last}, so the layers after it have no experts; the model configuration has "
            "experts in every layer or in none"
        )
    return {
        "num_experts": config["moe_num_experts"],
        "experts_per_token": config["moe_k"],
        "normalize_expert_shares": True,
        "expert_balance_rate": ModelConfig().expert_balance_rate,
        "expert_bias": "shares",
    }


def _rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Older files have rope_theta and rope_scaling, newer ones both in rope_parameters; transformers reads
    rope_scaling first."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    unknown = [key for key, value in rope.items() if key not in _ROPE_KEYS and value is not None]
    if unknown:
        raise CheckpointError(
            f"the rotary parameters have {unknown[0]!r}, which the model configuration cannot express"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise CheckpointError("partial_rotary_factor is not 1, which the model configuration cannot express")
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
        if window is not None and not isinstance(window, int):
            raise CheckpointError(f"sliding_window is {window!r}; it must be a whole number, or null for no window")
        return window
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        reason = "use_sliding_window is set" if config.get("use_sliding_window") else f"layer_types has {min(kinds)!r}"
        raise CheckpointError(f"{reason}; the model configuration has one window for all layers")
    return None


def _known(words: Mapping[str, str], word: str) -> str:
    if word not in words:
        raise CheckpointError(f"{word!r} is not supported; supported are {', '.join(words)}")
    return words[word]
