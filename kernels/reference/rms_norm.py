"""Root-mean-square normalisation over the last axis (Zhang and Sennrich 2019, 1910.07467), in torch.

Statistics and products are fp32 (fp64 for fp64); the result is rounded to x's dtype once.
"""

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.dtypes import to_dtype, wide


def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    x_wide = wide(x)
    rstd = torch.rsqrt(torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square() / x.shape[-1] + epsilon)
    return to_dtype(x_wide * rstd * weight, x.dtype), rstd


def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; reciprocal root of the sum's mean square)."""
    total = x + residual
    y, rstd = forward(total, weight, epsilon)
    return y, total, rstd


def input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm.

    After `add_forward`, x is the sum, dx the gradient of the sum, and the result that of x and of the residual.
    """
    normalised = wide(x) * rstd
    scaled = wide(dy) * weight
    mean = (scaled * normalised).mean(-1, keepdim=True)
    through = to_dtype((scaled - normalised * mean) * rstd, x.dtype)
    return through if dx is None else through + dx


def weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Gradient of weight [h], summed over all other axes in fp32 (fp64), in the weight's dtype."""
    return (to_dtype(_weight_gradient(dy, x, rstd), weight.dtype),)


def backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight: the bits of `input_gradient` and `weight_gradient`."""
    return input_gradient(dy, x, rstd, weight, dx), *weight_gradient(dy, x, rstd, weight)


@opaque(
    "rms_norm_weight_gradient(Tensor dy, Tensor x, Tensor rstd) -> Tensor",
    lambda dy, x, rstd: rstd.new_empty(x.shape[-1]),
)
def _weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    return (wide(x) * rstd).mul_(dy).flatten(0, -2).sum(0)
