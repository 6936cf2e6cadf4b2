"""config.json for a model of ours: which family of transformers it is, and how that family writes it.

The importer is the judge: what is written is read back, and a field that comes back otherwise has no place there.
"""

from collections.abc import Mapping
from typing import Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_config import field_differences
from megapipe.checkpoint.hugging_face_files import kind_of
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.models.gpt_hugging_face import Correspondence, WeightMappingError

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}
_BERTS = {"post": ("bert", "Bert"), "pre": ("megatron-bert", "MegatronBert")}
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def exported_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json. dtype: of the weights, as safetensors names it.

    Raises CheckpointError naming every field of `model` that the nearest family has no place for.
    """
    config = _bert(model) if isinstance(model, BertModelConfig) else _gpt(model)
    names = _names(model, config)
    differences = field_differences(model, kind_of(model).fields(config, names))
    if differences:
        raise CheckpointError(
            f"this model cannot be exported to transformers; the nearest family, {config['model_type']}, would "
            f"need other weights: {'; '.join(differences)}"
        )
    return {**config, "dtype": _DTYPES[dtype], "torch_dtype": _DTYPES[dtype]}


def exported_pairs(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Correspondence]:
    """Parameter -> where it lives in the family of an exported config. Raises CheckpointError."""
    try:
        return {pair.spec.name: pair for pair in kind_of(model).pairs(config)}
    except WeightMappingError as error:
        raise CheckpointError(f"this model cannot be exported as {config['model_type']}: {error}") from error


def _names(model: ModelConfig, config: Mapping[str, Any]) -> list[str]:
    try:
        return [name for pair in kind_of(model).pairs(config) for name in pair.theirs]
    except WeightMappingError:  # the fields that are at fault are told by their differences
        return []


def _gpt(model: ModelConfig) -> dict[str, Any]:
    if model.positions == "learned":
        return _gpt2(model)
    if model.num_experts is not None:
        family = "ernie4_5_moe" if model.balances_experts else "mixtral"
    elif model.qk_norm:
        family = "qwen3"
    elif model.bias == "qkv":
        family = "qwen2"
    else:
        family = "llama" if model.sliding_window is None else "mistral"
    return _decoder(model, family)


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": [_ARCHITECTURES["gpt2"]],
        "vocab_size": model.vocabulary_size,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "activation_function": _GELU.get(model.activation, "gelu_new"),
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.embedding_dropout,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _decoder(model: ModelConfig, family: str) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": model.vocabulary_size,
        "max_position_embeddings": model.max_positions,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        **_own_fields(model, family),
    }


def _own_fields(model: ModelConfig, family: str) -> dict[str, Any]:
    """What the families do not share. mlp_bias and attention_bias, where known, default to none."""
    if family == "mistral":
        return {"sliding_window": model.sliding_window}
    if family == "mixtral":
        return {
            "sliding_window": model.sliding_window,
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
        }
    if family == "ernie4_5_moe":
        return {
            "use_bias": False,
            "moe_intermediate_size": model.ffn_size,
            "moe_num_experts": model.num_experts,
            "moe_k": model.experts_per_token,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": model.num_layers - 1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        }
    if family in ("qwen2", "qwen3"):
        return {"use_sliding_window": False}
    return {}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return found


def _bert(model: BertModelConfig) -> dict[str, Any]:
    kind, name = _BERTS[model.norm_position]
    return {
        "model_type": kind,
        "architectures": [name + ("ForPreTraining" if model.sentence_head else "ForMaskedLM")],
        "vocab_size": model.vocabulary_size,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": 2,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": _GELU.get(model.activation, "gelu"),
        "layer_norm_eps": model.norm_epsilon,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
