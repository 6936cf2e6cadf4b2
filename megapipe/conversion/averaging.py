"""The mean of several checkpoints' weights (Izmailov et al., 1803.05407), one tensor in memory at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.progress import tracked
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.source import Source
from megapipe.conversion.target import Target
from megapipe.conversion.transfer import abandoned_on_error, cast

_ELEMENTS = 1 << 24
"""That are summed at once."""


def average(sources: Sequence[Source], contents: Contents, open_target: Callable[[], Target]) -> list[str]:
    """Write the mean of the sources' weights, summed in float64; returns the target's notes.

    contents: of the target. Raises CheckpointError where the sources are not of one model; nothing is written then.
    """
    named = [_weights(source) for source in sources]
    shapes = [{name: tensor.shape for name, tensor in weights.items()} for weights in named]
    for number, found in enumerate(shapes[:-1], start=1):
        if found != shapes[-1]:
            name = next(name for name in {**found, **shapes[-1]} if found.get(name) != shapes[-1].get(name))
            raise CheckpointError(
                f"checkpoints of different models cannot be averaged: {name} has shape {found.get(name)} in "
                f"checkpoint {number} and {shapes[-1].get(name)} in the last one"
            )
    target = open_target()
    with abandoned_on_error(target), tracked(contents.tensors, "averaging") as tensors:
        for tensor in tensors:
            parts = [(source, weights[tensor.name]) for source, weights in zip(sources, named, strict=True)]
            target.add(tensor, _mean(parts, tensor))
        return target.finish()


def _mean(parts: Sequence[tuple[Source, StoredTensor]], tensor: StoredTensor) -> Tensor:
    """The mean in a tensor's type, summed some rows at a time: float64 takes twice the memory."""
    found = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    rows = max(1, _ELEMENTS * tensor.shape[0] // found.numel())
    for start in range(0, tensor.shape[0], rows):
        index = (slice(start, min(start + rows, tensor.shape[0])), *(slice(0, length) for length in tensor.shape[1:]))
        total = torch.zeros(found[index].shape, dtype=torch.float64)
        for source, stored in parts:
            total.add_(source.read(stored, index).double())
        found[index] = cast(total.div_(len(parts)).float(), tensor)
    return found


def _weights(source: Source) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in source.contents.tensors if tensor.kind == WEIGHTS}
