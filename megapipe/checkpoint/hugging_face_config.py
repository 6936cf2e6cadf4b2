"""The families of Hugging Face models as a table: keys of config.json, fields of our model configuration, both ways.

A key that is not listed here may change the model's results, so a configuration with it is refused. The lists contain
the keys that transformers 4 and 5 write; a test changes every key that transformers writes and compares logits.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.config.model import ModelConfig
from megapipe.models import bert_hugging_face, gpt_hugging_face
from megapipe.models.gpt_hugging_face import Correspondence


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


_WITHOUT_EFFECT = _keys(
    # Origin of the file, and transformers' representation of the model.
    "transformers_version architectures model_type auto_map _name_or_path dtype torch_dtype torchscript "
    "use_bfloat16 "
    "attn_implementation _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled "
    "experts_implementation _experts_implementation "
    # Results of a forward pass other than logits, and how they are computed.
    "output_hidden_states output_attentions return_dict use_cache chunk_size_feed_forward gradient_checkpointing "
    "tie_last_hidden_states tf_legacy_loss "
    # Heads for other tasks, and their labels.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout "
    # Training only: dropout, initial weights.
    "initializer_range "
    # Tokens and generation, which the tokenizer and generation_config.json define.
    "tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens cross_attention_hidden_size tie_encoder_decoder "
    # Written by tools for fine-tuning.
    "unsloth_fixed unsloth_version neftune_noise_alpha"
)
"""Keys that do not affect logits, in every family."""

_ALWAYS = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({},)}
"""Permitted values of each key, in every family."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFamily:
    """One model_type of transformers.

    kind: kind of our model configuration. keys: key of config.json -> our field; `words` translates activations.
    needs: field -> the value that all such models have. more: returns further fields from the keys `reads` of a
    config.json. writes: further key -> a field, a function of the model, or a value to write. ignored: keys that do
    not affect logits. fixed: key -> the values that the model configuration can express. defaults: values that
    transformers uses for missing keys; other keys are required.
    """

    kind: str
    keys: Mapping[str, str]
    needs: Mapping[str, Any]
    words: Mapping[str, str]
    reads: frozenset[str] = frozenset()
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    writes: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read(self) -> frozenset[str]:
        """The keys that determine the model."""
        return self.reads | self.keys.keys()

    def fields(self, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the model fields that a config.json sets, with optional sizes resolved.

        tensors: canonical names; they decide whether embeddings are tied if neither the configuration nor the family
        does. Raises CheckpointError for an unknown key, or if the model configuration cannot express a key's value;
        KeyError for a missing key.
        """
        tied = {"tie_word_embeddings": "lm_head.weight" not in tensors}
        config = self._checked({**tied, **self.defaults, **config})
        values = {ours: config[key] for key, ours in self.keys.items()}
        for key in _ACTIVATION_KEYS & self.keys.keys():
            values["activation"] = known_word(self.words, config[key], f"{key} ")
        heads = values["num_heads"]
        values["num_kv_heads"] = values.get("num_kv_heads") or heads
        values["head_size"] = values.get("head_size") or values["hidden_size"] // heads
        if self.kind == "bert":
            starts = {start for start in SENTENCE_HEAD for name in tensors if name.startswith(start)}
            values["sentence_head"] = len(starts) == len(SENTENCE_HEAD)
        return {**self.needs, **values, **self.more(config)}

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """Return a config.json for a model. The caller compares its `fields`, because the model may not fit."""
        values = _values(model)
        written = {key: values[ours] for key, ours in self.keys.items()}
        for key in _ACTIVATION_KEYS & self.keys.keys():
            theirs = {ours: word for word, ours in reversed(list(self.words.items()))}
            written[key] = theirs.get(model.activation, self.defaults[key])
        for key, value in self.writes.items():
            value = values[value] if isinstance(value, str) else value
            written[key] = value(model) if callable(value) else value
        return written

    def _checked(self, config: dict[str, Any]) -> dict[str, Any]:
        fixed = {**_ALWAYS, **self.fixed}
        for key, value in config.items():
            if key in fixed:
                # In Python, 0 equals False; in JSON, it does not.
                if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in fixed[key]):
                    raise CheckpointError(
                        f"{key} is {_shown(value)}, which the model configuration cannot express; it can be "
                        f"{' or '.join(map(_shown, fixed[key]))}"
                    )
            elif key not in self.read | self.ignored | _WITHOUT_EFFECT and value is not None:
                reason = _REASONS.get(
                    key,
                    f"which is not known for {config['model_type']} and may change what the model computes; remove "
                    "the key if you know that it does not",
                )
                raise CheckpointError(f"{key} is {_shown(value)}, {reason}")
        return config


_ACTIVATION_KEYS = {"activation_function", "hidden_act"}


def _values(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model by name, with optional sizes resolved."""
    sizes = {"num_kv_heads": model.kv_heads, "head_size": model.head_dim}
    return {**vars(model), **sizes, "ffn_hidden_size": model.ffn_size}


_REASONS = {"quantization_config": "its weights are quantized; convert the model that they were made from"}


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def known_word(words: Mapping[str, str], word: str, key: str = "") -> str:
    """Return our word for a word of another program. Raises CheckpointError for a word that is not in the table."""
    if word not in words:
        raise CheckpointError(f"{key}{word!r} is not supported; supported are {', '.join(words)}")
    return words[word]


_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_length",
    },
}
"""Kind of RoPE scaling -> key of the rotary parameters -> field of RopeScaling."""
_ROPE_KEYS = _ROPE_FIELDS["llama3"].keys() | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def _rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions.

    Older files have rope_theta and rope_scaling; newer files have both in rope_parameters. transformers reads
    rope_scaling first.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    unknown = [key for key in rope if key not in _ROPE_KEYS and rope[key] is not None]
    if unknown:
        raise CheckpointError(
            f"the rotary parameters have {unknown[0]!r}, which the model configuration cannot express"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise CheckpointError("partial_rotary_factor is not 1, which the model configuration cannot express")
    fields = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {**fields, "rope_scaling.kind": "none"}
    kind = known_word({"linear": "linear", "llama3": "llama3"}, kind)
    stretched = {f"rope_scaling.{ours}": rope[key] for key, ours in _ROPE_FIELDS[kind].items()}
    return {**fields, "rope_scaling.kind": kind, **stretched}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return None
    values = {key: getattr(scaling, ours) for key, ours in _ROPE_FIELDS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **values}


def _with_window(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window")
    if window is not None and not isinstance(window, int):
        raise CheckpointError(f"sliding_window is {window!r}; it must be a whole number, or null for no window")
    return {**_rotary_fields(config), "sliding_window": window}


def _qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Qwen's fields. Its sliding_window applies only with `use_sliding_window`, and only in some layers."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        reason = "use_sliding_window is set" if config.get("use_sliding_window") else f"layer_types has {min(kinds)!r}"
        raise CheckpointError(f"{reason}; the model configuration has one window for all layers")
    return _rotary_fields(config)


def _ernie(config: Mapping[str, Any]) -> dict[str, Any]:
    last = config["moe_layer_end_index"]
    if last != -1 and last < config["num_hidden_layers"] - 1:
        raise CheckpointError(
            f"moe_layer_end_index is {last}, so the layers after it have no experts; the model configuration has "
            "experts in every layer or in none"
        )
    return _rotary_fields(config)


_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_SWIGLU = {"silu": "swiglu", "swish": "swiglu"}
_SIZES = {
    "vocab_size": "vocabulary_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
}
_TIED = {"tie_word_embeddings": "tie_embeddings"}
_DECODER_KEYS = {
    **_SIZES,
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "hidden_act": "activation",
    "rms_norm_eps": "norm_epsilon",
    **_TIED,
}
_DECODER_NEEDS = {"normalization": "rms_norm", "positions": "rotary", "bias": "none"}
_DENSE = {"qk_norm": False, "sliding_window": None, "num_experts": None}
_ROTARY = _keys("max_position_embeddings rope_parameters rope_scaling rope_theta")
_DECODER_WITHOUT_EFFECT = _keys(
    # pretraining_tp splits matrix products as they were split in Llama's training; the results are the same.
    "attention_dropout pretraining_tp max_sequence_length is_decoder"
)
_OPTIONAL_SIZES = {"num_key_value_heads": None, "head_dim": None}
_DECODER_DEFAULTS = {**_OPTIONAL_SIZES, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_NO_BIAS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}


def _decoder(architecture: str, ffn_key: str = "intermediate_size", **changes: Any) -> HuggingFaceFamily:
    """Return the family of a decoder like Llama. changes: additions to Llama's entries."""
    entries: dict[str, Any] = {
        "keys": {**_DECODER_KEYS, ffn_key: "ffn_hidden_size"},
        "needs": {**_DECODER_NEEDS, **_DENSE},
        "reads": _ROTARY,
        "writes": {
            "architectures": [architecture],
            "max_position_embeddings": "max_positions",
            "rope_theta": "rope_theta",
            "rope_scaling": _rope_scaling,
            "attention_dropout": "attention_dropout",
            "initializer_range": "init_std",
        },
        "ignored": _DECODER_WITHOUT_EFFECT,
        "fixed": _NO_BIAS,
        "defaults": _DECODER_DEFAULTS,
    }
    merged = {name: entries[name] | changes.get(name, type(entries[name])()) for name in entries}
    return HuggingFaceFamily(kind="gpt", words=_SWIGLU, more=changes.get("more", _rotary_fields), **merged)


_EXPERTS = {"normalize_expert_shares": True, "expert_balance_rate": 0.0}
_BALANCED = {"expert_balance_rate": ModelConfig().expert_balance_rate, "expert_bias": "shares"}
_ROUTER_OUTPUT = _keys("output_router_logits router_aux_loss_coef")
_QWEN: dict[str, Any] = {
    "reads": _keys("use_sliding_window layer_types"),
    "more": _qwen,
    # The key use_sliding_window, which is read, decides whether there are windows.
    "ignored": _keys("sliding_window max_window_layers"),
    "writes": {"use_sliding_window": False},
}
_ERNIE_CONSTANTS = {
    "use_bias": False,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
_ENCODER_NEEDS = {"normalization": "layer_norm", "positions": "learned", "bias": "all"}


def _bert(name: str, norm_position: str) -> HuggingFaceFamily:
    """Return a BERT family. norm_position: `post`, after the residual sums, or `pre`, before attention and MLP."""
    return HuggingFaceFamily(
        kind="bert",
        keys={
            **_SIZES,
            "max_position_embeddings": "max_positions",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "layer_norm_eps": "norm_epsilon",
            **_TIED,
        },
        needs={**_ENCODER_NEEDS, "qk_norm": False, "norm_position": norm_position},
        words=_GELU,
        writes={
            "architectures": lambda model: [name + ("ForPreTraining" if model.sentence_head else "ForMaskedLM")],
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "initializer_range": "init_std",
            "type_vocab_size": 2,
        },
        ignored=_keys(
            "hidden_dropout_prob attention_probs_dropout_prob directionality pooler_fc_size "
            "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
        ),
        fixed={
            "type_vocab_size": (2,),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
        },
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": True},
    )


FAMILIES: Mapping[str, HuggingFaceFamily] = {
    "gpt2": HuggingFaceFamily(
        kind="gpt",
        keys={
            "vocab_size": "vocabulary_size",
            "n_layer": "num_layers",
            "n_embd": "hidden_size",
            "n_head": "num_heads",
            "n_positions": "max_positions",
            "n_inner": "ffn_hidden_size",
            "activation_function": "activation",
            "layer_norm_epsilon": "norm_epsilon",
            **_TIED,
        },
        needs={**_ENCODER_NEEDS, **_DENSE},
        words=_GELU,
        more=lambda config: {"ffn_hidden_size": config["n_inner"] or 4 * config["n_embd"]},
        writes={
            "architectures": ["GPT2LMHeadModel"],
            "n_ctx": "max_positions",
            "embd_pdrop": "embedding_dropout",
            "attn_pdrop": "attention_dropout",
            "resid_pdrop": "hidden_dropout",
            "initializer_range": "init_std",
        },
        ignored=_keys(
            "n_ctx resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation "
            "summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn is_decoder output_past "
            "predict_special_tokens"
        ),
        fixed={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        defaults={
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "llama": _decoder("LlamaForCausalLM", fixed={"rope_interleaved": (False,), "is_llama_config": (True,)}),
    "mistral": _decoder(
        "MistralForCausalLM",
        reads=_keys("sliding_window"),
        more=_with_window,
        writes={"sliding_window": "sliding_window"},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": _decoder(
        "MixtralForCausalLM",
        keys={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
        # Mixtral balances experts by an auxiliary loss, so its router has no bias.
        needs=_EXPERTS,
        reads=_keys("sliding_window"),
        more=_with_window,
        writes={"sliding_window": "sliding_window"},
        ignored=_ROUTER_OUTPUT,
        # Noise is added only in training, but a router that was trained with it expects it there.
        fixed={"router_jitter_noise": (0.0, None)},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    ),
    "qwen2": _decoder(
        "Qwen2ForCausalLM",
        needs={"bias": "qkv"},
        fixed={"use_mrope": (False,)},
        defaults={"num_key_value_heads": 32},
        **_QWEN,
    ),
    "qwen3": _decoder(
        "Qwen3ForCausalLM",
        needs={"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        **_QWEN,
    ),
    "ernie4_5_moe": _decoder(
        "Ernie4_5_MoeForCausalLM",
        "moe_intermediate_size",
        keys={"moe_num_experts": "num_experts", "moe_k": "experts_per_token"},
        needs={**_EXPERTS, **_BALANCED},
        reads=_keys("moe_layer_end_index"),
        more=_ernie,
        writes={
            "intermediate_size": "ffn_hidden_size",
            "moe_layer_end_index": lambda model: model.num_layers - 1,
            **_ERNIE_CONSTANTS,
        },
        # intermediate_size is the width of layers without experts, of which there are none.
        ignored=_ROUTER_OUTPUT | {"intermediate_size"},
        fixed={key: (value,) for key, value in _ERNIE_CONSTANTS.items()},
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
    ),
    "bert": _bert("Bert", "post"),
    "megatron-bert": _bert("MegatronBert", "pre"),
}
"""Family of each model_type."""


def family_of(config: Mapping[str, Any], kind: str | None = None) -> HuggingFaceFamily:
    """Return the family that `model_type` names. Raises CheckpointError unless it is known and of this kind."""
    known = [name for name, family in FAMILIES.items() if kind in (None, family.kind)]
    if config.get("model_type") not in known:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} is not supported; weights can be taken from {', '.join(known)}"
        )
    return FAMILIES[config["model_type"]]


def nearest_family(model: ModelConfig) -> str:
    """Return the model_type that fits a model best."""
    if model.kind == "bert":
        return "bert" if vars(model)["norm_position"] == "post" else "megatron-bert"
    if model.positions == "learned":
        return "gpt2"
    if model.num_experts is not None:
        return "ernie4_5_moe" if model.balances_experts else "mixtral"
    if model.qk_norm:
        return "qwen3"
    if model.bias == "qkv":
        return "qwen2"
    return "llama" if model.sliding_window is None else "mistral"


def field_differences(model: ModelConfig, wanted: Mapping[str, Any]) -> list[str]:
    """Return one message for each field of `model` that differs from `wanted`."""
    stretched = {f"rope_scaling.{name}": value for name, value in vars(model.rope_scaling).items()}
    actual = {**_values(model), **stretched}
    if wanted.get("expert_balance_rate") and model.expert_balance_rate:
        actual["expert_balance_rate"] = wanted["expert_balance_rate"]  # any rate matches: it belongs to the training
    if not actual.get("sentence_head", True):
        wanted = {**wanted, "sentence_head": False}  # a model without a sentence head ignores the folder's
    if "sliding_window" in wanted:
        window = _effective(wanted["sliding_window"], model)
        wanted = {**wanted, "sliding_window": window}
        actual["sliding_window"] = _effective(model.sliding_window, model)
    return [
        f"set model.{name} to {value!r} (it is {actual[name]!r})"
        for name, value in wanted.items()
        if actual[name] != value
    ]


def _effective(window: int | None, model: ModelConfig) -> int | None:
    """Return the window, or None if it is at least as long as the longest sequence and therefore hides nothing."""
    return None if window is None or window >= model.max_positions else window


def correspondences(model: ModelConfig, model_type: str) -> Sequence[Correspondence]:
    """Return the tensors of every parameter in a family. Raises WeightMappingError if a parameter has none."""
    if FAMILIES[model_type].kind == "bert":
        return bert_hugging_face.correspondences(model)  # type: ignore[arg-type]  # the model of a BERT
    return gpt_hugging_face.correspondences(model, model_type)  # type: ignore[arg-type]  # a GPT family


def canonical_names(family: HuggingFaceFamily, stored: Collection[str]) -> dict[str, str]:
    """Map each stored tensor to its name in transformers' model with a head. Raises CheckpointError."""
    if family.kind == "bert":
        return bert_names(stored)
    bare = not any(name.startswith(_GPT_BODIES) for name in stored)
    body = "transformer." if any(name.startswith("h.") for name in stored) else "model."
    body = body if bare else ""
    return {name: name if name == "lm_head.weight" else body + name for name in stored}


def is_redundant(name: str, model: ModelConfig) -> bool:
    """Return whether an unused tensor repeats another, is not a weight, or belongs to a head that the model does not
    have."""
    if model.kind == "gpt":
        return gpt_hugging_face.is_redundant(name, model)
    if name == _DECODER_WEIGHT:
        return model.tie_embeddings
    left_out = not vars(model)["sentence_head"] and name.startswith(SENTENCE_HEAD)
    return left_out or name in (_BIAS_AGAIN, "bert.embeddings.position_ids")


_GPT_BODIES = ("transformer.", "model.")
"""Prefixes of names, unless the folder contains the model without its language-modeling head."""
_BODY, _HEADS = "bert.", "cls."
SENTENCE_HEAD = ("bert.pooler.", "cls.seq_relationship.")
_BIAS, _BIAS_AGAIN = "cls.predictions.bias", "cls.predictions.decoder.bias"
_DECODER_WEIGHT = "cls.predictions.decoder.weight"
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names in TensorFlow, which the published files of BERT use."""


def bert_names(stored: Collection[str]) -> dict[str, str]:
    """Map each stored tensor to its name in transformers' BERT with heads.

    Raises CheckpointError if a folder contains a tensor under both its old and its new name.
    """
    bare = not any(name.startswith((_BODY, _HEADS)) for name in stored)
    names: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name in stored:
        known = name
        for old, new in _OLD_LEAVES.items():
            known = known.removesuffix(old) + new if known.endswith(old) else known
        known = _BODY + known if bare else known
        if known in origins:
            raise CheckpointError(
                f"the weights contain both {origins[known]!r} and {name!r}, two names of the same tensor; remove the "
                "wrong one"
            )
        names[name] = known
        origins[known] = name
    if _BIAS not in origins and _BIAS_AGAIN in names:
        names[_BIAS_AGAIN] = _BIAS
    return names
