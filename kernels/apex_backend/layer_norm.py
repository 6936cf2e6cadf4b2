"""Layer normalisation by apex: the functions and arguments of `megapipe.kernels.reference.layer_norm`.

apex knows no halves of a backward, so each half does both and drops one.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD, why_unsupported
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.cuda_backend.norms import operands, result_of, statistic_of
from megapipe.kernels.opaque import opaque


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take x of this dtype and width."""
    return library.refusal(device, dtype, width) or why_unsupported([LAYER_NORM_FORWARD, LAYER_NORM_BACKWARD])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.save_for_backward(inputs[0], mean, rstd, inputs[1])
    ctx.mark_non_differentiable(mean, rstd)


def _forward_backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


@opaque(
    "layer_norm_apex(Tensor x, Tensor weight, Tensor bias, float epsilon) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, bias, epsilon: (result_of(x), statistic_of(x), statistic_of(x)),
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, mean [..., 1], reciprocal standard deviation [..., 1])."""
    x, *parameters = operands("layer_norm", x, {}, {"weight": weight, "bias": bias})
    if not x.numel():  # apex would launch no blocks, which CUDA refuses
        return result_of(x), statistic_of(x), statistic_of(x)
    y, mean, rstd = LAYER_NORM_FORWARD(x, x.shape[-1:], *parameters, epsilon)
    return y, mean.view(*x.shape[:-1], 1), rstd.view(*x.shape[:-1], 1)


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
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return backward(dy, x, mean, rstd, weight, dx)[0]


def weight_gradient(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias [h], summed over all other axes, in their dtype."""
    _, dweight, dbias = backward(dy, x, mean, rstd, weight)
    return dweight, dbias


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    through, dweight, dbias = _backward(dy, x, mean, rstd, weight)
    return through if dx is None else through + dx, dweight, dbias


@opaque(
    "layer_norm_apex_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight) "
    "-> (Tensor, Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight: (result_of(x), torch.empty_like(weight), torch.empty_like(weight)),
)
def _backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, dy, weight = operands("layer_norm", x, {"dy": dy}, {"weight": weight})
    if not x.numel():
        return result_of(x), torch.zeros_like(weight), torch.zeros_like(weight)
    statistics = (mean.float().flatten(), rstd.float().flatten())
    # Bias, epsilon and the last flag matter only to builds that can recompute x from the result; this does not ask.
    dx, dweight, dbias = LAYER_NORM_BACKWARD(dy, *statistics, x, x.shape[-1:], weight, weight, 0.0, False)
    return dx, dweight, dbias
