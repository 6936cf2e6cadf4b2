"""From one checkpoint to another, one tensor in memory at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.progress import tracked
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.formats import Format
from megapipe.conversion.source import Source
from megapipe.conversion.target import Target

_PIECE = 1 << 22
"""Elements that are cast at once, since looking for infinite ones takes memory too."""

PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""What weights may be stored as -> its name in safetensors files. Moments keep their type."""


def contents_for(contents: Contents, target: Format, precision: str | None, weights_only: bool) -> Contents:
    """What of a checkpoint a target is given."""
    if weights_only or not target.keeps_run:
        contents = contents.weights_only()
    if not any(tensor.kind == WEIGHTS for tensor in contents.tensors):
        raise CheckpointError("the checkpoint contains no weights, so there is nothing to convert")
    if precision is None:
        return contents
    return replace(
        contents,
        tensors=tuple(
            replace(tensor, dtype=PRECISIONS[precision]) if is_weight(tensor.kind) else tensor
            for tensor in contents.tensors
        ),
    )


def is_weight(kind: str) -> bool:
    """Whether a kind is a version of the weights and no moment."""
    return kind.startswith(WEIGHTS)


def transfer(source: Source, contents: Contents, target: Target) -> list[str]:
    """Give every tensor of `contents`, some of the source's with other types, to a target; returns its notes.

    Raises CheckpointError, and then there is nothing at the target's path.
    """
    stored = {(tensor.name, tensor.kind): tensor for tensor in source.contents.tensors}
    with abandoned_on_error(target), tracked(contents.tensors, "converting") as tensors:
        for tensor in tensors:
            target.add(tensor, cast(source.read(stored[tensor.name, tensor.kind]), tensor))
        return target.finish()


@contextmanager
def abandoned_on_error(target: Target) -> Iterator[None]:
    """Whatever goes wrong, Ctrl-C included, leaves nothing half written."""
    try:
        yield
    except BaseException:
        target.abandon()
        raise


def cast(values: Tensor, tensor: StoredTensor) -> Tensor:
    """Values in a tensor's type. Raises CheckpointError where finite ones would become infinite."""
    dtype = DTYPES[tensor.dtype]
    if values.dtype == dtype:
        return values
    found = torch.empty(values.shape, dtype=dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(values.dtype).max
    for old, new in zip(values.reshape(-1).split(_PIECE), found.view(-1).split(_PIECE), strict=True):
        new.copy_(old)
        if narrower and bool((new.isinf() & old.isfinite()).any()):
            raise CheckpointError(
                f"{tensor.kind} of {tensor.name} has values beyond {torch.finfo(dtype).max:g}, the largest of "
                f"{tensor.dtype}; choose --precision bf16 or fp32"
            )
    return found
