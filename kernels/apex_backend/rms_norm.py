"""Root-mean-square normalisation by apex: the functions and arguments of `megapipe.kernels.reference.rms_norm`.

apex knows no halves of a backward, so each half does both and drops one.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.extension import contiguous_like, extension, statistic_of
from megapipe.kernels.apex_backend.extension import refusal as refusal
from megapipe.kernels.opaque import opaque


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])
    ctx.mark_non_differentiable(output[1])


def _forward_backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


@opaque(
    "rms_norm_apex(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    lambda x, weight, epsilon: (contiguous_like(x), statistic_of(x)),
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    y, rstd = extension().rms_forward_affine(x.contiguous(), x.shape[-1:], weight.contiguous(), epsilon)
    return y, rstd.view(*x.shape[:-1], 1)


def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; reciprocal root of the sum's mean square)."""
    total = x + residual
    y, rstd = forward(total, weight, epsilon)
    return y, total, rstd


def input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return backward(dy, x, rstd, weight, dx)[0]


def weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Gradient of weight [h], summed over all other axes, in its dtype."""
    return (backward(dy, x, rstd, weight)[1],)


def backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    through, dweight = _backward(dy, x, rstd, weight)
    return through if dx is None else through + dx, dweight


@opaque(
    "rms_norm_apex_backward(Tensor dy, Tensor x, Tensor rstd, Tensor weight) -> (Tensor, Tensor)",
    lambda dy, x, rstd, weight: (contiguous_like(x), torch.empty_like(weight)),
)
def _backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # apex needs no epsilon here, and looks at none of its rows' shapes but the last axis.
    arguments = (dy.contiguous(), rstd.float().flatten(), x.contiguous(), x.shape[-1:], weight.contiguous())
    dx, dweight = extension().rms_backward_affine(*arguments, 0.0, False)
    return dx, dweight
