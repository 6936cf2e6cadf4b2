"""Rotary position embedding (Su et al. 2021, 2104.09864), in torch."""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.reference.dtypes import to_dtype


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back; x itself is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _rotate(x, cosine, sine, interleaved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradient, cosine, -sine, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    pairs = [first * cosine - second * sine, second * cosine + first * sine]
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return to_dtype(rotated, x.dtype)


def apply(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate channel pairs of x [b, s, heads, d] by the angles of cosine and sine [s, d/2].

    Pair i is channels i and i + d/2 (Llama, GPT-NeoX), or 2i and 2i + 1 where interleaved (the paper, GPT-J).
    """
    return _Rotation.apply(x, cosine.unsqueeze(-2), sine.unsqueeze(-2), interleaved)
