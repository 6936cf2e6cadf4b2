"""What the families of decoders like Llama have in common: sizes, rotary positions, names of tensors."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.family import ROPE_SCALING, Family, FamilyError, Tensors, keys, known_word

GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
SIZES = {
    "vocab_size": "vocabulary_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
}
TIED = {"tie_word_embeddings": "tie_embeddings"}
EXPERTS = {"normalize_expert_shares": True, "expert_balance_rate": 0.0}
ROUTER_OUTPUT = keys("output_router_logits router_aux_loss_coef")
_ATTENTION = "model.layers.{layer}.self_attn"
QKV = Tensors((f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"), ("query_key_value",))
NAMES: Mapping[str, str | Tensors] = {
    "embedding.word": "model.embed_tokens",
    "blocks.attention_norm": "model.layers.{layer}.input_layernorm",
    "blocks.attention.qkv": QKV,
    "blocks.attention.query_norm": f"{_ATTENTION}.q_norm",
    "blocks.attention.key_norm": f"{_ATTENTION}.k_norm",
    "blocks.attention.output": f"{_ATTENTION}.o_proj",
    "blocks.mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "blocks.mlp.up": Tensors(("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj"), ("stacked",)),
    "blocks.mlp.down": "model.layers.{layer}.mlp.down_proj",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}
"""Llama's names; a family lists those that differ."""
_ROPE_KEYS = ROPE_SCALING["llama3"].keys() | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str | Tensors]:
    """Return the names of router and experts. Files have experts one by one: transformers stacks them when it reads
    them. module: of a layer."""
    prefix = f"model.layers.{{layer}}.{module}"
    experts = prefix + ".experts.{expert}"
    return {
        "blocks.mlp.router": f"{prefix}.gate",
        "blocks.mlp.up": Tensors((f"{experts}.{gate}", f"{experts}.{up}"), ("stacked",)),
        "blocks.mlp.down": Tensors((f"{experts}.{down}",), ("stacked",)),
    }


def rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions.

    Older files have rope_theta and rope_scaling; newer files have both in rope_parameters. transformers reads
    rope_scaling first. Raises FamilyError for values that the model configuration cannot express.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    unknown = [key for key in rope if key not in _ROPE_KEYS and rope[key] is not None]
    if unknown:
        raise FamilyError(f"the rotary parameters have {unknown[0]!r}, which the model configuration cannot express")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise FamilyError("partial_rotary_factor is not 1, which the model configuration cannot express")
    fields = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {**fields, "rope_scaling.kind": "none"}
    kind = known_word({"linear": "linear", "llama3": "llama3"}, kind)
    stretched = {f"rope_scaling.{ours}": rope[key] for key, ours in ROPE_SCALING[kind].items()}
    return {**fields, "rope_scaling.kind": kind, **stretched}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return None
    values = {key: getattr(scaling, ours) for key, ours in ROPE_SCALING[scaling.kind].items()}
    return {"rope_type": scaling.kind, **values}


def with_window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions, and the window. Raises FamilyError."""
    window = config.get("sliding_window")
    if window is not None and not isinstance(window, int):
        raise FamilyError(f"sliding_window is {window!r}; it must be a whole number, or null for no window")
    return {**rotary_fields(config), "sliding_window": window}


def qwen_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Qwen's fields. Its sliding_window applies only with `use_sliding_window`, and only in some layers."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        reason = "use_sliding_window is set" if config.get("use_sliding_window") else f"layer_types has {min(kinds)!r}"
        raise FamilyError(f"{reason}; the model configuration has one window for all layers")
    return rotary_fields(config)


SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""Keys of layers without experts, of which there are none."""
QWEN: dict[str, Any] = {
    "reads": keys("use_sliding_window layer_types"),
    "more": qwen_fields,
    # The key use_sliding_window, which is read, decides whether there are windows.
    "ignored": keys("sliding_window max_window_layers"),
    "writes": {"use_sliding_window": False},
}
"""Entries of Qwen's families."""


def decoder(
    model_type: str,
    architecture: str,
    *,
    ffn_key: str = "intermediate_size",
    epsilon_key: str = "rms_norm_eps",
    **changes: Any,
) -> Family:
    """Register the family of a decoder like Llama. changes: additions to Llama's entries, or other words."""
    entries: dict[str, Any] = {
        "fields": {
            **SIZES,
            "num_key_value_heads": "num_kv_heads",
            "head_dim": "head_size",
            epsilon_key: "norm_epsilon",
            **TIED,
            ffn_key: "ffn_hidden_size",
        },
        "needs": {"normalization": "rms_norm", "positions": "rotary", "bias": "none"},
        "reads": keys("max_position_embeddings rope_parameters rope_scaling rope_theta"),
        "writes": {
            "architectures": [architecture],
            "max_position_embeddings": "max_positions",
            "rope_theta": "rope_theta",
            "rope_scaling": _rope_scaling,
            "attention_dropout": "attention_dropout",
            "initializer_range": "init_std",
        },
        "ignored": keys(
            # pretraining_tp splits matrix products as they were split in Llama's training; the results are the same.
            "attention_dropout pretraining_tp max_sequence_length is_decoder"
        ),
        "fixed": {"attention_bias": (False, None), "mlp_bias": (False, None), "partial_rotary_factor": (1.0, None)},
        "defaults": {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", epsilon_key: 1e-6},
        "tensors": NAMES,
    }
    merged = {name: entries[name] | changes.pop(name, type(entries[name])()) for name in entries}
    others = {"words": {"silu": "swiglu", "swish": "swiglu"}, "more": rotary_fields, **changes}
    return Family(model_type=model_type, kind="gpt", activation="hidden_act", **merged, **others)
