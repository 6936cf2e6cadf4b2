"""The fields of our model configuration and the tensor names that a folder of BERT or MegatronBert gives."""

from collections.abc import Collection, Mapping
from typing import Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_keys import known_config
from megapipe.config.bert import BertModelConfig

NORM_POSITIONS = {"bert": "post", "megatron-bert": "pre"}
"""model_type -> the place of the norms in such a model."""
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_BODY, _HEADS = "bert.", "cls."
_SENTENCE_HEAD = ("bert.pooler.", "cls.seq_relationship.")
_BIAS, _BIAS_AGAIN = "cls.predictions.bias", "cls.predictions.decoder.bias"
_DECODER = "cls.predictions.decoder.weight"
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""As TensorFlow named them, and with it the files that BERT was published as."""


def canonical_names(stored: Collection[str]) -> dict[str, str]:
    """Return tensor in the files -> its name in a BERT of transformers with its heads.

    Raises CheckpointError where a folder has one tensor under both its old and its new name.
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


def model_fields(config: Mapping[str, Any], tensors: Collection[str], model: BertModelConfig) -> dict[str, Any]:
    """Field of BertModelConfig -> the value that these weights need, optional sizes resolved.

    tensors: their canonical names. A model without a sentence head may leave the folder's out.
    Raises CheckpointError for a model_type or a variant that the model configuration cannot express.
    """
    kind = config.get("model_type")
    if kind not in NORM_POSITIONS:
        raise CheckpointError(
            f"model_type {kind!r} is not supported; a BERT's initial weights can be taken from "
            f"{', '.join(NORM_POSITIONS)}"
        )
    config = known_config(config)
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    heads = config["num_attention_heads"]
    has_sentence_head = all(any(name.startswith(start) for name in tensors) for start in _SENTENCE_HEAD)
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "max_positions": config["max_position_embeddings"],
        "normalization": "layer_norm",
        "norm_epsilon": config.get("layer_norm_eps", 1e-12),
        "norm_position": NORM_POSITIONS[kind],
        "activation": _ACTIVATIONS[activation],
        "positions": "learned",
        "bias": "all",
        "qk_norm": False,
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "sentence_head": model.sentence_head and has_sentence_head,
    }


def is_redundant(name: str, model: BertModelConfig) -> bool:
    """Whether a left-over tensor repeats another, holds no weight, or belongs to a head that the model leaves out."""
    if name == _DECODER:
        return model.tie_embeddings
    left_out = not model.sentence_head and name.startswith(_SENTENCE_HEAD)
    return left_out or name in (_BIAS_AGAIN, "bert.embeddings.position_ids")
