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
    whole = values.numel() // BLOCK * BLOCK
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    if whole:
        total = total + _norm(values[:whole].view(-1, BLOCK)).square().sum()
    if whole < values.numel():
        total = total + _norm(values[whole:].view(1, -1)).square().sum()
    return total


def _norm(blocks: Tensor) -> Tensor:
    dtype = None if blocks.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(blocks, dim=1, dtype=dtype).double()
