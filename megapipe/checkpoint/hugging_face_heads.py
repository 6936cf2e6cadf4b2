"""Comparison of tensors that a folder contains twice: the configuration ties them, but their values may differ."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError

_MATRICES = {
    "lm_head.weight": ("model.embed_tokens.weight", "transformer.wte.weight"),
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
}
"""Output matrix -> the embedding that it may be tied to, by family."""
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
_TIED_BY_DEFAULT = ("gpt2", "bert", "megatron-bert", "ernie4_5_moe")
"""model_type of the families whose missing tie_word_embeddings means true."""
_PIECE = 1 << 22
"""Elements that are compared at once."""


def with_stored_head(
    config: Mapping[str, Any], names: Collection[str], read: Callable[[str], Tensor]
) -> tuple[Mapping[str, Any], str]:
    """Return the configuration, untied if the folder's output matrix differs from its embedding, and a note about it.

    transformers 5 computes with the stored matrix in such a folder. names: canonical names of the folder's tensors.
    read: returns a tensor by its canonical name. The note is empty if nothing was changed.

    Raises CheckpointError for two different output biases of a BERT, of which only one can be the model's.
    """
    if all(name in names for name in _BIASES) and not _equal(*map(read, _BIASES)):
        raise CheckpointError(
            f"{_BIASES[0]} and {_BIASES[1]} differ, but the model has one output bias; remove the wrong tensor"
        )
    if not config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT):
        return config, ""
    for head, embeddings in _MATRICES.items():
        for embedding in embeddings:
            if head in names and embedding in names and not _equal(read(head), read(embedding)):
                note = f"tie_word_embeddings is true, but {head} differs from {embedding}; the model is read as untied"
                return {**config, "tie_word_embeddings": False}, note
    return config, ""


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pieces = zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True)
    return all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in pieces)
