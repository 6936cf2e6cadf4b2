"""Weights of Hugging Face transformers' BERTs as canonical tensors, and back.

With norms after the residual sums these are the weights of BertForPreTraining, with norms before attention and MLP
those of MegatronBertForPreTraining; without a sentence head, those of ...ForMaskedLM.
"""

from collections.abc import Mapping

from torch import Tensor

from megapipe.config.bert import BertModelConfig
from megapipe.models.gpt_hugging_face import (
    Correspondence,
    WeightMappingError,
    alone,
    joined,
    only,
    parted,
    query_key_value,
)
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import ParameterSpec

_OUTER = {
    "embedding.word": "bert.embeddings.word_embeddings",
    "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.token_type": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "head.norm": "bert.encoder.ln",
    "head.transform": "cls.predictions.transform.dense",
    "head.transform_norm": "cls.predictions.transform.LayerNorm",
    "head.pooler": "bert.pooler.dense",
    "head.sentence": "cls.seq_relationship",
}
_BLOCK = {
    "attention.output": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_NORMS = {
    "post": {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    "pre": {"attention_norm": "attention.ln", "mlp_norm": "ln"},
}
_OUTPUT = {"head.output.weight": "cls.predictions.decoder.weight", "head.output.bias": "cls.predictions.bias"}
_REPEATED = ("cls.predictions.decoder.bias", "bert.embeddings.position_ids")
"""Further entries of their state dict: the bias again, and a buffer without weights."""


def from_hugging_face(theirs: Mapping[str, Tensor], model: BertModelConfig) -> dict[str, Tensor]:
    """Canonical global tensors by name from a transformers state dict.

    Raises WeightMappingError for a tensor that is missing, left over or of the wrong shape.
    """

    def redundant(name: str) -> bool:
        tied = model.tie_embeddings and name == _OUTPUT["head.output.weight"]
        return tied or name in _REPEATED

    return joined(
        theirs, correspondences(model), "bert", redundant, "check num_layers, sentence_head and tie_embeddings"
    )


def to_hugging_face(ours: Mapping[str, Tensor], model: BertModelConfig) -> dict[str, Tensor]:
    """A transformers state dict from canonical global tensors by name; what is tied appears once.

    Raises WeightMappingError for a missing tensor and for a parameter that transformers' BERT has no place for.
    """
    return parted(ours, correspondences(model))


def correspondences(model: BertModelConfig) -> list[Correspondence]:
    """Where every parameter of `model` lives in transformers' weights."""
    specs = {spec.name: spec for layer in model_layers(model) for spec in layer.parameters.values()}
    return [_correspondence(spec, model) for spec in specs.values()]


def _correspondence(spec: ParameterSpec, model: BertModelConfig) -> Correspondence:
    if spec.name in _OUTPUT:
        return Correspondence(spec, (_OUTPUT[spec.name],), only, alone)
    module, _, leaf = spec.name.rpartition(".")
    if module in _OUTER:
        return Correspondence(spec, (f"{_OUTER[module]}.{leaf}",), only, alone)
    _, _, inner = module.partition("blocks.")
    index, _, path = inner.partition(".")
    layer = f"bert.encoder.layer.{index}"
    if path == "attention.qkv":
        theirs = tuple(f"{layer}.attention.self.{name}.{leaf}" for name in ("query", "key", "value"))
        return Correspondence(spec, theirs, *query_key_value(model, fused=False))
    places = _BLOCK | _NORMS[model.norm_position]
    if path not in places or (path == "mlp.up" and model.activation == "swiglu"):
        raise WeightMappingError(
            f"transformers' BERT has no parameter for {spec.name} of shape {spec.shape}; check activation and "
            "qk_norm of the model"
        )
    return Correspondence(spec, (f"{layer}.{places[path]}.{leaf}",), only, alone)
