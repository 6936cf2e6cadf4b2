"""Common parts of the families of decoders like Llama: sizes, rotary positions, names of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.spec.family import OMITTED, ROPE_SCALING, Family, FamilyError, Tensors, keys, known_word

GELU = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "gelu_python": "gelu",
}
UNGATED = {**GELU, "relu": "relu", "silu": "silu", "swish": "silu", "relu2": "relu_squared"}
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "relu": "reglu",
    "relu2": "reglu_squared",
    **{word: name.replace("gelu", "geglu") for word, name in GELU.items()},
}
"""transformers' words for the activation function of an MLP without a gate, and of an MLP with a gate -> our words."""
SIZES = {
    "vocab_size": "vocabulary_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
}
TIED = {"tie_word_embeddings": "tie_embeddings"}
EXPERTS = {"normalize_expert_shares": True, "expert_balance_rate": 0.0}
ROUTER_OUTPUT = keys("output_router_logits router_aux_loss_coef")
UNUSED_BIASES = ("rotary_emb.inv_freq", "e_score_correction_bias")
"""Ends of names of tensors that a model may leave unused: frequencies of rotary positions, and biases of experts if
every token uses all experts."""


def gated_names(module: str, source: str) -> dict[str, str | Tensors]:
    """Return the names of an MLP with a gate, whose matrix is apart from that of `up`."""
    return {
        f"{module}.up": Tensors((f"{source}.gate_proj", f"{source}.up_proj"), ("stacked",)),
        f"{module}.down": f"{source}.down_proj",
    }


LAYER = "model.layers.{layer}"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
QKV = Tensors(tuple(f"{ATTENTION}.{part}_proj" for part in "qkv"), ("query_key_value",))
NAMES: Mapping[str, str | Tensors] = {
    "embedding.word": "model.embed_tokens",
    "blocks.attention_norm": f"{LAYER}.input_layernorm",
    "blocks.attention.qkv": QKV,
    "blocks.attention.query_norm": f"{ATTENTION}.q_norm",
    "blocks.attention.key_norm": f"{ATTENTION}.k_norm",
    "blocks.attention.output": f"{ATTENTION}.o_proj",
    "blocks.mlp_norm": f"{LAYER}.post_attention_layernorm",
    **gated_names("blocks.mlp", MLP),
    "head.norm": "model.norm",
    "head.output": "lm_head",
}
"""Llama's names; a family lists those that differ."""
_ROPE_KEYS = {key for kind in ROPE_SCALING.values() for key in kind} | {
    "rope_type", "type", "rope_theta", "partial_rotary_factor"
}  # fmt: skip
_OPTIONAL = keys("attention_factor beta_fast beta_slow truncate mscale mscale_all_dim")
Fields = dict[str, Any]


def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str | Tensors]:
    """Return the names of the router and the experts. module: name of the module that has them in a layer; the other
    arguments are names of its matrices. Files store experts one by one; transformers stacks them when it reads
    them."""
    prefix = f"{LAYER}.{module}"
    experts = prefix + ".experts.{expert}"
    return {
        "experts.mlp.router": f"{prefix}.gate",
        "experts.mlp.up": Tensors((f"{experts}.{gate}", f"{experts}.{up}"), ("stacked",)),
        "experts.mlp.down": Tensors((f"{experts}.{down}",), ("stacked",)),
    }


def rotary_fields(config: Mapping[str, Any]) -> Fields:
    """Return the fields of rotary positions.

    Older files have rope_theta and rope_scaling; newer files have both in rope_parameters. transformers reads
    rope_scaling first. Raises FamilyError for values that the model configuration cannot express.
    """
    return all_rotated(stretched(described_rope(config), config))


def described_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says about rotary positions, in its older or newer form."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def all_rotated(fields: Fields) -> Fields:
    """Return the fields of rotary positions. Raises FamilyError if a part of the channels does not rotate."""
    if fields["rotary_fraction"] != 1:
        raise FamilyError("partial_rotary_factor is not 1, which transformers ignores in models of this type")
    return fields


def stretched(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Fields:
    """Return the fields of one kind of rotary positions. `rope` describes it; keys that it lacks are read from
    `config`."""
    unknown = [key for key in rope if key not in _ROPE_KEYS and rope[key] is not None]
    if unknown:
        raise FamilyError(f"the rotary parameters have {unknown[0]!r}, which the model configuration cannot express")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    fields: Fields = {"rope_theta": theta, "rotary_fraction": 1.0 if share is None else share}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {**fields, "rope_scaling.kind": "none"}
    kind = known_word({name: name for name in ROPE_SCALING if name != "none"}, kind)
    names, key = ROPE_SCALING[kind], "original_max_position_embeddings"
    longest = config["max_position_embeddings"]
    first = config.get(key) or rope.get(key) or longest
    given = {**{name: value for name, value in rope.items() if value is not None}, key: first}
    if kind in ("longrope", "yarn") and "factor" not in given:
        given["factor"] = longest / first
    missing = [each for each in names if each not in _OPTIONAL | given.keys()]
    if missing:
        raise FamilyError(f"the rotary parameters of kind {kind} lack {missing[0]!r}")
    scaling = {f"rope_scaling.{names[each]}": given[each] for each in names if each in given}
    if kind == "dynamic":
        scaling["rope_scaling.original_length"] = longest
    return {**fields, "rope_scaling.kind": kind, **scaling}


def rope_scaling(model: ModelConfig) -> Fields | None:
    """Return transformers' description of a model's RoPE scaling; None if the model has no scaling."""
    scaling, names = model.rope_scaling, ROPE_SCALING[model.rope_scaling.kind]
    if scaling.kind == "none":
        return None
    values = {key: getattr(scaling, field) for key, field in names.items()}
    if scaling.kind == "longrope" and scaling.factor == model.max_positions / scaling.original_length:
        del values["factor"]  # transformers computes this ratio
    usual = {key: getattr(RopeScaling(), names[key]) for key in _OPTIONAL & values.keys()}
    unusual = {key: each for key, each in values.items() if usual.get(key, ...) != each}
    return {"rope_type": scaling.kind, **unusual}


def _rotary_fraction(model: ModelConfig) -> Any:
    return OMITTED if model.rotary_fraction == 1 else model.rotary_fraction


def window_fields(config: Mapping[str, Any]) -> Fields:
    """Return the window of all layers. Raises FamilyError."""
    window = config.get("sliding_window")
    if window is not None and not isinstance(window, int):
        raise FamilyError(f"sliding_window is {window!r}; it must be a whole number, or null for no window")
    return {"sliding_window": window}


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_fields(kinds: Sequence[str], fields: Mapping[str, Fields]) -> Fields:
    """Return the fields for blocks of different kinds. kinds: the kind of each block. fields: the fields of each kind;
    kinds that are not listed have no fields. If all blocks have the same kind, its fields become those of the
    model."""
    if len(set(kinds)) == 1 or not any(fields.get(kind) for kind in kinds):
        model_fields = dict(fields.get(kinds[0], {}))
        if "rope_scaling" in model_fields:  # all fields, so that none of another kind remains
            scaling = vars(RopeScaling(**model_fields.pop("rope_scaling")))
            model_fields |= {f"rope_scaling.{name}": each for name, each in scaling.items()}
        return model_fields
    pattern = [kind if fields.get(kind) else "base" for kind in kinds]
    return {
        "layer_kinds": {kind: dict(fields[kind]) for kind in pattern if kind != "base"},
        "layer_pattern": tuple(pattern[: _period(pattern)]),
    }


def _period(values: Sequence[str]) -> int:
    """Return the period of the values, or their number if they do not repeat. A file decides how many values there
    are, so this takes linear time (prefix function of Knuth, Morris and Pratt)."""
    borders = [0]
    for value in values[1:]:
        border = borders[-1]
        while border and values[border] != value:
            border = borders[border - 1]
        borders.append(border + (values[border] == value))
    return len(values) - borders[-1]


def windowed_layers(default: Callable[[Mapping[str, Any]], list[str]], **sliding: Any) -> Callable[..., Fields]:
    """Return a function for `Family.more` that reads layer_types. default: returns the types for a config.json without
    layer_types. sliding: further fields of blocks with a window."""

    def fields(config: Mapping[str, Any]) -> Fields:
        kinds = listed_layers(config, default)
        window = window_fields(config)["sliding_window"]
        if SLIDING in kinds and not window:
            raise FamilyError(f"layer_types has {SLIDING!r}, but sliding_window is {window}; correct one of them")
        return layer_fields(
            ["local" if kind == SLIDING else FULL for kind in kinds],
            {"local": {"sliding_window": window, **sliding}},
        )

    return fields


def listed_layers(config: Mapping[str, Any], default: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    """Return the type of every layer. default: returns the types for a config.json without layer_types. Raises
    FamilyError."""
    kinds, number = config.get("layer_types") or default(config), config["num_hidden_layers"]
    unknown = set(kinds) - {SLIDING, FULL}
    if unknown or len(kinds) < number:
        wrong = repr(min(unknown)) if unknown else f"{len(kinds)} entries for {number} layers"
        raise FamilyError(f"layer_types has {wrong}; each layer needs {SLIDING} or {FULL}")
    return list(kinds[:number])


def alternating(config: Mapping[str, Any]) -> list[str]:
    """Return types of layers of which every second one, from the first on, has a window."""
    return [FULL if index % 2 else SLIDING for index in range(config["num_hidden_layers"])]


def ropes_of_kinds(config: Mapping[str, Any], whole: Fields, local: Fields) -> tuple[Fields, Fields]:
    """Return the fields of rotary positions of a model, and the fields that its layers with a window have instead.

    They are read from rope_parameters, by type of layer. whole, local: values for keys that rope_parameters lacks, for
    layers without and with a window. Raises FamilyError.
    """
    rope = config.get("rope_parameters") or {FULL: {}, SLIDING: {}}
    if set(rope) != {FULL, SLIDING}:
        raise FamilyError(f"rope_parameters has {', '.join(sorted(rope))}; it needs {FULL} and {SLIDING}")
    untruncated = [kind for kind, each in rope.items() if each.get("truncate") is False]
    if untruncated:
        raise FamilyError(
            f"truncate is false in rope_parameters of {untruncated[0]}, which transformers "
            "ignores in models of this type; remove it"
        )
    model = all_rotated(stretched({**whole, **rope[FULL]}, config))
    windowed = all_rotated(stretched({**local, **rope[SLIDING]}, config))
    window_fields: Fields = {"rope_theta": windowed["rope_theta"]}
    if windowed != model | window_fields:
        named = ((name.partition(".")[2], value) for name, value in windowed.items())
        window_fields["rope_scaling"] = {field: value for field, value in named if field}
    return model, window_fields


def rope_parameters(model: ModelConfig) -> Fields:
    """Return transformers' description of rotary positions by type of layer, with a default for a type that the model
    lacks."""
    parameters: Fields = {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default"}}
    for each in reversed(blocks(model)):
        kind = FULL if each.sliding_window is None else SLIDING
        parameters[kind] = {"rope_type": "default", "rope_theta": each.rope_theta, **(rope_scaling(each) or {})}
    return parameters


def blocks(model: ModelConfig) -> list[ModelConfig]:
    """Return the configuration of every block."""
    return [model.of_kind(model.kind_of_layer(index)) for index in range(model.num_layers)]


def dense_size(model: ModelConfig) -> int:
    """Return the width of the MLP of blocks without experts."""
    sizes = (each.ffn_size for each in blocks(model) if each.num_experts is None)
    return next(sizes, model.ffn_size)


def num_shared(model: ModelConfig) -> int:
    """Return the number of shared experts: the width of all of them over the width of an expert."""
    return (model.shared_expert_size or 0) // model.ffn_size


def layer_types(model: ModelConfig) -> list[str]:
    """Return transformers' layer_types of a model."""
    return [FULL if each.sliding_window is None else SLIDING for each in blocks(model)]


def window_of(model: ModelConfig) -> int | None:
    """Return the window of the blocks that have one."""
    return next(filter(None, (each.sliding_window for each in blocks(model))), None)


WINDOWS: dict[str, Any] = {"layer_types": layer_types, "sliding_window": window_of}
"""Keys to write for models whose layers may have a window."""


def _qwen_layers(config: Mapping[str, Any]) -> list[str]:
    first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else config["num_hidden_layers"]
    return [FULL if index < first else SLIDING for index in range(config["num_hidden_layers"])]


def _qwen_window(config: Mapping[str, Any]) -> Fields:
    """Return Qwen's windows: its sliding_window applies only with `use_sliding_window`."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return windowed_layers(_qwen_layers)({**config, "sliding_window": window})


QWEN: dict[str, Any] = {
    "reads": keys("use_sliding_window layer_types sliding_window max_window_layers"),
    "more": (rotary_fields, _qwen_window),
    "writes": {
        **WINDOWS,
        "use_sliding_window": lambda model: window_of(model) is not None,
        "max_window_layers": lambda model: (
            layer_types(model).index(SLIDING) if window_of(model) is not None else OMITTED
        ),
    },
}
"""Entries that Qwen's families have in common."""


def bias_fields(config: Mapping[str, Any]) -> Fields:
    """Return the field `bias` for the keys attention_bias and mlp_bias of a config.json, which may lack mlp_bias."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention:
        return {"bias": "all" if mlp else "attention"}
    return {"bias": "mlp" if mlp else "none"}


ATTENTION_BIAS: Fields = {"attention_bias": lambda model: model.has_bias("attention.output")}
BIASES: Fields = {**ATTENTION_BIAS, "mlp_bias": lambda model: model.has_bias("mlp.up")}
"""Keys to write for models with biases."""


def with_additions(entries: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes, and entries of a family merged with the changes of the same names."""
    return {**changes, **{name: each | changes.get(name, type(each)()) for name, each in entries.items()}}


def decoder(
    model_type: str,
    architecture: str,
    *,
    ffn_key: str = "intermediate_size",
    head_key: str = "head_dim",
    epsilon_key: str = "rms_norm_eps",
    activation: str = "hidden_act",
    **changes: Any,
) -> Family:
    """Register the family of a decoder like Llama. changes: additions to Llama's entries, or other arguments of
    `Family`."""
    entries: dict[str, Any] = {
        "fields": {
            **SIZES,
            "num_key_value_heads": "num_kv_heads",
            head_key: "head_size",
            epsilon_key: "norm_epsilon",
            **TIED,
            ffn_key: "ffn_hidden_size",
        },
        "needs": {"normalization": "rms_norm", "positions": "rotary", "bias": "none"},
        "reads": keys(
            "max_position_embeddings original_max_position_embeddings rope_parameters "
            "rope_scaling rope_theta partial_rotary_factor"
        ),
        "writes": {
            "architectures": [architecture],
            "max_position_embeddings": "max_positions",
            "rope_theta": "rope_theta",
            "rope_scaling": rope_scaling,
            "partial_rotary_factor": _rotary_fraction,
            "attention_dropout": "attention_dropout",
            "initializer_range": "init_std",
        },
        "ignored": keys(
            # pretraining_tp splits matrix products as they were split in Llama's training; the results are the same.
            "pretraining_tp max_sequence_length is_decoder"
        ),
        "fixed": {"attention_bias": (False, None), "mlp_bias": (False, None)},
        "defaults": {"num_key_value_heads": None, head_key: None, activation: "silu", epsilon_key: 1e-6},
        "tensors": NAMES,
    }
    merged = with_additions(entries, changes)
    merged["fixed"] = {key: values for key, values in merged["fixed"].items() if key not in merged["reads"]}
    usual = {"words": GATED, "more": (rotary_fields,)}
    return Family(model_type=model_type, kind="gpt", activation=activation, **usual | merged)
