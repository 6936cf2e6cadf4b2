"""Layer normalisation over the last axis (Ba et al. 2016, 1607.06450), in torch."""

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque

_backward = torch.ops.aten.native_layer_norm_backward


def forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, mean [..., 1], reciprocal standard deviation [..., 1])."""
    weight, bias = _statistics_dtype(x, weight), _statistics_dtype(x, bias)
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; mean and reciprocal deviation of the sum)."""
    total = x + residual
    y, mean, rstd = forward(total, weight, bias, epsilon)
    return y, total, mean, rstd


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm.

    After `add_forward`, x is the sum, dx the gradient of the sum, and the result that of x and of the residual.
    """
    weight = _statistics_dtype(x, weight)
    through = _backward(dy, x, x.shape[-1:], mean, rstd, weight, weight, [True, False, False])[0]
    return through if dx is None else through + dx


def _fake_weight_gradient(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(weight)


@opaque(
    "layer_norm_weight_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> (Tensor, Tensor)",
    _fake_weight_gradient,
)
def weight_gradient(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias [h], summed over all other axes, in their dtype."""
    wide = _statistics_dtype(x, weight)
    # torch.compile narrows the statistics to the dtype of x.
    mean, rstd = mean.to(wide.dtype), rstd.to(wide.dtype)
    _, dweight, dbias = _backward(dy, x, x.shape[-1:], mean, rstd, wide, wide, [False, True, True])
    return dweight.to(weight.dtype), dbias.to(weight.dtype)


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias: the bits of `input_gradient` and `weight_gradient`."""
    return input_gradient(dy, x, mean, rstd, weight, dx), *weight_gradient(dy, x, mean, rstd, weight)


def _statistics_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """On the CPU torch keeps mean and deviation in the weight's dtype: bf16 would cost half of their digits."""
    return weight.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else weight
