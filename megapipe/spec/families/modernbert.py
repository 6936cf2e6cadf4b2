"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): an encoder with rotary positions, in which most layers attend
only to nearby tokens."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import (
    BIASES,
    FULL,
    GATED,
    LAYER,
    SIZES,
    SLIDING,
    TIED,
    UNGATED,
    Fields,
    bias_fields,
    layer_fields,
    layer_types,
    listed_layers,
    rope_parameters,
    ropes_of_kinds,
    window_of,
)
from megapipe.spec.family import OMITTED, Family, FamilyError, Tensors, keys, known_word

_NORMS = {True: "layer_norm", False: "layer_norm_without_bias"}


def _local_attention(model: ModelConfig) -> Any:
    """Return the width of the window, which transformers halves for each side."""
    window = window_of(model)
    return OMITTED if window is None else 2 * (window - 1)


def _types(config: Mapping[str, Any]) -> list[str]:
    every = config["global_attn_every_n_layers"]
    return [SLIDING if index % every else FULL for index in range(config["num_hidden_layers"])]


def _layers(config: Mapping[str, Any]) -> Fields:
    """Return rotary positions, windows, and the norms of attention, which the first layer lacks. Raises
    FamilyError."""
    for key, least in (("local_attention", 0), ("global_attn_every_n_layers", 1)):
        if type(config[key]) is not int or config[key] < least:
            raise FamilyError(f"{key} is {config[key]!r}; it must be a whole number, at least {least}")
    whole, rope = ropes_of_kinds(
        config, {"rope_theta": config["global_rope_theta"]}, {"rope_theta": config["local_rope_theta"]}
    )
    local: Fields = {"sliding_window": config["local_attention"] // 2 + 1, **rope}
    first, *rest = ["local" if kind == SLIDING else FULL for kind in listed_layers(config, _types)]
    fields = {"local": local, "first": {"attention_norm": False, **(local if first == "local" else {})}}
    return {**whole, **layer_fields(["first", *rest], fields)}


def _norms(config: Mapping[str, Any]) -> Fields:
    return {"normalization": _NORMS[bool(config["norm_bias"])]}


def _head(config: Mapping[str, Any]) -> Fields:
    key = "classifier_activation"
    return {"transform_activation": known_word(UNGATED, config[key], f"{key} ")}


def _head_activation(model: ModelConfig) -> str:
    """Return transformers' word for the activation of the head."""
    assert isinstance(model, BertModelConfig)
    activation = model.transform_activation or model.usual_transform_activation
    return next(word for word, each in UNGATED.items() if each == activation)


Family(
    model_type="modernbert",
    kind="bert",
    fields={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "norm_eps": "norm_epsilon",
        "classifier_bias": "transform_bias",
        **TIED,
    },
    activation="hidden_activation",
    words={"gelu": "geglu", **GATED},
    needs={
        "norm_position": "pre",
        "embedding_norm": True,
        "positions": "rotary",
        "token_types": 0,
        "sentence_head": False,
    },
    reads=keys(
        "attention_bias mlp_bias norm_bias layer_types global_attn_every_n_layers local_attention rope_parameters "
        "global_rope_theta local_rope_theta classifier_activation max_position_embeddings"
    ),
    more=(_norms, bias_fields, _head, _layers),
    writes={
        **BIASES,
        "architectures": ["ModernBertForMaskedLM"],
        "classifier_activation": _head_activation,
        "norm_bias": lambda model: model.norm_kind.biased,
        "layer_types": layer_types,
        "local_attention": _local_attention,
        "rope_parameters": rope_parameters,
        "max_position_embeddings": "max_positions",
        "attention_dropout": "attention_dropout",
        "embedding_dropout": "embedding_dropout",
        "initializer_range": "init_std",
    },
    ignored=keys(
        "mlp_dropout classifier_pooling initializer_cutoff_factor deterministic_flash_attn "
        "reference_compile sparse_prediction sparse_pred_ignore_index repad_logits_with_grad "
        "cls_token_id layer_norm_eps"
    ),
    fixed={
        "decoder_bias": (True,),
        "position_embedding_type": ("absolute",),
        "rope_scaling": (None,),
    },
    defaults={
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "classifier_bias": False,
        "tie_word_embeddings": True,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
    },
    tensors={
        "embedding.word": "model.embeddings.tok_embeddings",
        "embedding.norm": "model.embeddings.norm",
        "blocks.attention_norm": f"{LAYER}.attn_norm",
        "blocks.attention.qkv": Tensors((f"{LAYER}.attn.Wqkv",), ("query_key_value",)),
        "blocks.attention.output": f"{LAYER}.attn.Wo",
        "blocks.mlp_norm": f"{LAYER}.mlp_norm",
        "blocks.mlp.up": f"{LAYER}.mlp.Wi",
        "blocks.mlp.down": f"{LAYER}.mlp.Wo",
        "head.norm": "model.final_norm",
        "head.transform": "head.dense",
        "head.transform_norm": "head.norm",
        "head.output.weight": "decoder.weight",
        "head.output.bias": "decoder.bias",
    },
    heads=("head.", "decoder."),
)
