"""Root-mean-square normalisation by apex: the functions and arguments of `megapipe.kernels.reference.rms_norm`.

apex knows no halves of a backward, so each half does both and drops one.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import RMS_NORM_BACKWARD, RMS_NORM_FORWARD, why_unsupported
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.cuda_backend.norms import operands, result_of, statistic_of
from megapipe.kernels.opaque import opaque


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take x of this dtype and width."""
    return library.refusal(device, dtype, width) or why_unsupported([RMS_NORM_FORWARD, RMS_NORM_BACKWARD])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])
    ctx.mark_non_differentiable(output[1])


def _forward_backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


@opaque(
    "rms_norm_apex(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    lambda x, weight, epsilon: (result_of(x), statistic_of(x)),
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    x, weight = operands("rms_norm", x, {}, {"weight": weight})
    if not x.numel():  # apex would launch no blocks, which CUDA refuses
        return result_of(x), statistic_of(x)
    y, rstd = RMS_NORM_FORWARD(x, x.shape[-1:], weight, epsilon)
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
    lambda dy, x, rstd, weight: (result_of(x), torch.empty_like(weight)),
)
def _backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x, dy, weight = operands("rms_norm", x, {"dy": dy}, {"weight": weight})
    if not x.numel():
        return result_of(x), torch.zeros_like(weight)
    # Epsilon and the last flag matter only to builds that can recompute x from the result; this does not ask.
    dx, dweight = RMS_NORM_BACKWARD(dy, rstd.float().flatten(), x, x.shape[-1:], weight, 0.0, False)
    return dx, dweight
