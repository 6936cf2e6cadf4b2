"""Common parts of the families of encoders like BERT: sizes, dropout, names of tensors."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import SIZES, TIED, UNGATED, with_additions
from megapipe.spec.family import Family, FamilyError, Tensors, known_word

_LAYER = "encoder.layer.{layer}"
POST_NORMS = {
    "blocks.attention_norm": f"{_LAYER}.attention.output.LayerNorm",
    "blocks.mlp_norm": f"{_LAYER}.output.LayerNorm",
}
PRE_NORMS = {
    "blocks.attention_norm": f"{_LAYER}.attention.ln",
    "blocks.mlp_norm": f"{_LAYER}.ln",
    "head.norm": "encoder.ln",
}
_BODY = {
    "embedding.word": "embeddings.word_embeddings",
    "embedding.position": "embeddings.position_embeddings",
    "embedding.token_type": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "blocks.attention.output": f"{_LAYER}.attention.output.dense",
    "blocks.mlp.up": f"{_LAYER}.intermediate.dense",
    "blocks.mlp.down": f"{_LAYER}.output.dense",
    "head.pooler": "pooler.dense",
}


def token_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no fields, but check type_vocab_size. Raises FamilyError if the table of token types would have no
    row."""
    if not isinstance(config["type_vocab_size"], int) or config["type_vocab_size"] < 1:
        raise FamilyError(f"type_vocab_size is {config['type_vocab_size']!r}; it must be at least 1")
    return {}


def same_activation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation of the masked-token head, which is the activation of the blocks."""
    return {"transform_activation": known_word(UNGATED, config["hidden_act"], "hidden_act ")}


def encoder(
    model_type: str, name: str, *, body: str, norms: dict[str, str], head: Mapping[str, str | Tensors], **changes: Any
) -> Family:
    """Register the family of an encoder like BERT.

    name: prefix of transformers' classes. body: prefix of the names of `norms` and of all others outside the heads.
    norms: names of the norms, and of other modules whose names differ from BERT's. head: names of modules in the
    heads, which get no prefix. changes: additions to BERT's entries, or other arguments of `Family`.
    """

    def architectures(model: ModelConfig) -> list[str]:
        return [name + ("ForPreTraining" if vars(model)["sentence_head"] else "ForMaskedLM")]

    qkv = tuple(f"{body}{_LAYER}.attention.self.{part}" for part in ("query", "key", "value"))
    entries: dict[str, Any] = {
        "fields": {
            **SIZES,
            "intermediate_size": "ffn_hidden_size",
            "layer_norm_eps": "norm_epsilon",
            "type_vocab_size": "token_types",
            **TIED,
        },
        "needs": {
            "normalization": "layer_norm",
            "positions": "learned",
            "bias": "all",
            "qk_norm": False,
            "norm_position": "pre" if "head.norm" in norms else "post",
        },
        "writes": {
            "architectures": architectures,
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "initializer_range": "init_std",
        },
        "fixed": {"position_embedding_type": ("absolute",), "is_decoder": (False,)},
        "defaults": {
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "tie_word_embeddings": True,
            "type_vocab_size": 2,
        },
        "tensors": {
            **{path: f"{body}{each}" for path, each in (_BODY | norms).items()},
            "blocks.attention.qkv": Tensors(qkv, ("query_key_value",)),
            **head,
        },
    }
    return Family(
        model_type=model_type,
        kind="bert",
        activation="hidden_act",
        words=UNGATED,
        body=body,
        # Names in TensorFlow, which the published files of BERT use.
        old_ends={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        **{"more": (token_types, same_activation)} | with_additions(entries, changes),
    )
