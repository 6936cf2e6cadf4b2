"""Rotary position embedding (Su et al. 2021, 2104.09864), half-rotation layout, in torch."""

from typing import Any

import torch
from torch import Tensor


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back; x itself is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradient, cosine, -sine), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


def apply(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + d/2) of x [b, s, heads, d] by the angles of cosine and sine [s, d/2]."""
    return _Rotation.apply(x, cosine.unsqueeze(-2), sine.unsqueeze(-2))
