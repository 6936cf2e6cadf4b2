"""The keys of config.json that each family of transformers knows, and what the importer may accept in them.

A key that is not listed here may change what the model computes, so its presence is refused by name. The lists hold
what transformers 4 and 5 write; a test changes every key that transformers writes and compares logits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.checkpoint.errors import CheckpointError


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


_WITHOUT_EFFECT = _keys(
    # Where the file is from, and how transformers represents the model.
    "transformers_version architectures model_type auto_map _name_or_path dtype torch_dtype torchscript "
    "use_bfloat16 "
    "attn_implementation _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled "
    "experts_implementation _experts_implementation "
    # What a forward pass returns besides logits, and how it is computed.
    "output_hidden_states output_attentions return_dict use_cache chunk_size_feed_forward gradient_checkpointing "
    "tie_last_hidden_states tf_legacy_loss "
    # Heads for other tasks, and their labels.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout "
    # Training only: dropout, initial weights.
    "initializer_range "
    # Tokens and generation, which are the tokenizer's and generation_config.json's.
    "tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens cross_attention_hidden_size tie_encoder_decoder "
    # Written by tools for fine-tuning.
    "unsloth_fixed unsloth_version neftune_noise_alpha"
)
"""In every family: no logit depends on them."""

_ALWAYS = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({},)}
"""In every family: key -> the values that may be in it."""


@dataclass(frozen=True)
class _Family:
    """The keys of one family.

    read: keys that the importer takes into account. without_effect: keys that no logit depends on. fixed: key -> the
    values of it that the model configuration can express. defaults: the value that transformers uses for a missing
    key, if it differs from the importer's own default.
    """

    read: frozenset[str]
    without_effect: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] | None = None
    defaults: Mapping[str, Any] | None = None


_DECODER = _keys(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_scaling "
    "rope_theta"
)
_DECODER_WITHOUT_EFFECT = _keys(
    # pretraining_tp repeats how Llama's matrices were cut when it was trained; the products are the same.
    "attention_dropout pretraining_tp max_sequence_length is_decoder"
)
_NO_BIAS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}
_QWEN_WITHOUT_EFFECT = _DECODER_WITHOUT_EFFECT | {"sliding_window", "max_window_layers"}
"""use_sliding_window, which is read, decides whether there are windows."""
_BERT = _Family(
    read=_keys(
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
        "max_position_embeddings layer_norm_eps tie_word_embeddings"
    ),
    without_effect=_keys(
        "hidden_dropout_prob attention_probs_dropout_prob directionality pooler_fc_size pooler_num_attention_heads "
        "pooler_num_fc_layers pooler_size_per_head pooler_type"
    ),
    fixed={"type_vocab_size": (2,), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
)

FAMILIES = {
    "gpt2": _Family(
        read=_keys(
            "vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon "
            "tie_word_embeddings"
        ),
        without_effect=_keys(
            "n_ctx resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation "
            "summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn is_decoder output_past "
            "predict_special_tokens"
        ),
        fixed={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    ),
    "llama": _Family(
        _DECODER, _DECODER_WITHOUT_EFFECT, {**_NO_BIAS, "rope_interleaved": (False,), "is_llama_config": (True,)}
    ),
    "mistral": _Family(
        _DECODER | {"sliding_window"},
        _DECODER_WITHOUT_EFFECT,
        _NO_BIAS,
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": _Family(
        _DECODER | {"sliding_window", "num_local_experts", "num_experts_per_tok"},
        _DECODER_WITHOUT_EFFECT | {"output_router_logits", "router_aux_loss_coef"},
        # Noise is added only in training, but a router that was trained with it expects it there.
        {**_NO_BIAS, "router_jitter_noise": (0.0, None)},
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    ),
    "qwen2": _Family(
        _DECODER | {"use_sliding_window", "layer_types"},
        _QWEN_WITHOUT_EFFECT,
        {**_NO_BIAS, "use_mrope": (False,)},
        {"num_key_value_heads": 32},
    ),
    "qwen3": _Family(
        _DECODER | {"use_sliding_window", "layer_types"},
        _QWEN_WITHOUT_EFFECT,
        _NO_BIAS,
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "ernie4_5_moe": _Family(
        _DECODER - {"intermediate_size"} | _keys("moe_intermediate_size moe_num_experts moe_k moe_layer_end_index"),
        # intermediate_size is the width of layers without experts, of which there are none.
        _DECODER_WITHOUT_EFFECT | {"intermediate_size", "output_router_logits", "router_aux_loss_coef"},
        {
            "use_bias": (False,),
            "moe_num_shared_experts": (0,),
            "moe_layer_start_index": (0,),
            "moe_layer_interval": (1,),
            "moe_norm_min": (1e-12,),
        },
        {
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
    "bert": _BERT,
    "megatron-bert": _BERT,
}
"""model_type -> its keys."""

_REASONS = {"quantization_config": "its weights are quantized; convert the model that they were made from"}


def known_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with transformers' defaults for missing keys. `model_type` is one of FAMILIES.

    Raises CheckpointError for a key that is not known, or whose value the model configuration cannot express.
    """
    family = FAMILIES[config["model_type"]]
    config = {**(family.defaults or {}), **config}
    fixed = {**_ALWAYS, **(family.fixed or {})}
    ignored = _WITHOUT_EFFECT | family.without_effect
    for key, value in config.items():
        if key in fixed:
            # In Python, 0 equals False; in JSON, it does not.
            if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in fixed[key]):
                raise CheckpointError(
                    f"{key} is {_shown(value)}, which the model configuration cannot express; it can be "
                    f"{' or '.join(map(_shown, fixed[key]))}"
                )
        elif key not in family.read and key not in ignored and value is not None:
            reason = _REASONS.get(
                key,
                f"which is not known for {config['model_type']} and may change what the model computes; remove the "
                "key if you know that it does not",
            )
            raise CheckpointError(f"{key} is {_shown(value)}, {reason}")
    return config


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
