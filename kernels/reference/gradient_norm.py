"""Squared norm of a flat gradient, from sums over blocks of 65,536 elements, in torch."""

import torch
from torch import Tensor

BLOCK = 65_536
"""Elements whose squares are summed together: the unit of the canonical norm (`megapipe.parallel.norms`)."""


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, block by block: a 0-dim float64 tensor on its device.

    It is finite only if every element is, so that one pass gives the norm and says whether to skip the step. Here
    elements beyond 1e17 may overflow too, since a block's norm is taken in the tensor's own dtype (at least fp32).
    """
    size = values.numel()
    if size < BLOCK:
        return _norm(values).square()
    whole = size // BLOCK * BLOCK
    total = _norm(values[:whole].view(-1, BLOCK), 1).square().sum()
    return total if whole == size else total + _norm(values[whole:]).square()


def _norm(values: Tensor, dim: int | None = None) -> Tensor:
    dtype = None if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dim=dim, dtype=dtype).double()
