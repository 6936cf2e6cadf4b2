"""Conversions around arithmetic in fp32, left out where they change nothing.

A conversion that changes nothing returns its argument, and torch 2.11, where a compiled autograd function computes it,
takes it for a second result and gives the first one a gradient of zero.
"""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 for fp64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`."""
    return x if x.dtype == dtype else x.to(dtype)
