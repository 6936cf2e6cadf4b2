"""Clipping of gradients by their global norm (Pascanu et al., 2013, algorithm 1)."""

import torch
from torch import Tensor

MARGIN = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


def clip_coefficient(norm: float | Tensor, limit: float) -> Tensor:
    """What to multiply gradients by so that their norm is at most `limit`: min(1, limit / (norm + 1e-6)), 0-dim fp32.

    norm: global L2 norm, 0-dim when a tensor; the quotient is taken in its precision (a float's is 64 bits) and on its
    device, without waiting for it. A norm that is not a number gives a coefficient that is not a number.
    Raises ValueError when limit is not above 0.
    """
    if not limit > 0:
        raise ValueError(f"optimizer.clip_norm is {limit}; it must be above 0, or null for no clipping")
    norm = torch.as_tensor(norm, dtype=torch.float64) if isinstance(norm, float) else norm
    return torch.clamp(limit / (norm + MARGIN), max=1.0).float()
