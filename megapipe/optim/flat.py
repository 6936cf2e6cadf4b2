"""What the optimizers' steps share: flat tensors, taken in blocks that stay in the cache."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements that a step on the CPU takes at a time."""


def check_flat(optimizer: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless all tensors are flat, contiguous and fp32, or all of them fp64."""
    dtypes: set[torch.dtype] = set()
    for tensor in tensors:
        dtypes.add(tensor.dtype)
        if tensor.dim() != 1 or tensor.dtype not in (torch.float32, torch.float64) or not tensor.is_contiguous():
            raise ValueError(
                f"{optimizer} got a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; pass flat, contiguous fp32 "
                "views (or fp64 ones)"
            )
    if len(dtypes) > 1:
        found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"{optimizer} got {found} tensors in one step; pass parameters, gradients and moments of one")


def blocks(lists: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Tensors that belong together, block by block; whole on a GPU. Raises ValueError where lengths differ."""
    for tensors in zip(*lists, strict=True):
        if tensors[0].is_cuda:
            yield tensors
        else:
            yield from zip(*(torch.split(tensor, BLOCK) for tensor in tensors), strict=True)
