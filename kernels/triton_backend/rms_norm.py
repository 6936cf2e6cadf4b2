"""Root-mean-square normalisation in Triton: the functions and arguments of `megapipe.kernels.reference.rms_norm`.

Statistics are fp32. Any width, any strides.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.row_norms_backward import (
    Operands,
    input_gradient_of,
    weight_gradients_of,
    whole_backward_of,
)
from megapipe.kernels.triton_backend.row_norms_forward import forward_launch, statistic_of


def _fake_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), statistic_of(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, rstd, weight)
    ctx.mark_non_differentiable(rstd)


def _forward_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, rstd, weight = ctx.saved_tensors
    return *backward(dy, x, rstd, weight), None


@opaque(
    "rms_norm_triton(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    _fake_forward,
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    x, weight = x.contiguous(), weight.contiguous()
    y, rstd = torch.empty_like(x), statistic_of(x)
    forward_launch(x, None, weight, None, y, None, None, rstd, epsilon).run()
    return y, rstd


def _fake_add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _fake_forward(x, weight, epsilon)
    return y, torch.empty_like(y), rstd


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, rstd = output
    ctx.save_for_backward(total, rstd, inputs[2])
    ctx.mark_non_differentiable(rstd)


def _add_forward_backward(ctx: Any, dy: Tensor, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    total, rstd, weight = ctx.saved_tensors
    dx, dweight = backward(dy, total, rstd, weight, dtotal)
    return dx, dx, dweight, None


@opaque(
    "rms_norm_triton_add(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor, Tensor)",
    _fake_add_forward,
    _keep_sum,
    _add_forward_backward,
)
def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; reciprocal root of the sum's mean square)."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    y, total, rstd = torch.empty_like(x), torch.empty_like(x), statistic_of(x)
    forward_launch(x, residual, weight, None, y, total, None, rstd, epsilon).run()
    return y, total, rstd


@opaque(
    "rms_norm_triton_input_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor weight, Tensor? dx=None) -> Tensor",
    lambda dy, x, rstd, weight, dx=None: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return input_gradient_of(Operands.contiguous(dy, x, None, rstd, weight, dx))


@opaque(
    "rms_norm_triton_weight_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor weight) -> Tensor",
    lambda dy, x, rstd, weight: torch.empty_like(weight),
)
def _weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    (dweight,) = weight_gradients_of(Operands.contiguous(dy, x, None, rstd, weight))
    return dweight


def weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Gradient of weight [h], summed over all other axes in fp32, in the weight's dtype."""
    return (_weight_gradient(dy, x, rstd, weight),)


@opaque(
    "rms_norm_triton_backward(Tensor dy, Tensor x, Tensor rstd, Tensor weight, Tensor? dx=None) -> (Tensor, Tensor)",
    lambda dy, x, rstd, weight, dx=None: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight),
    ),
)
def backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight: the bits of `input_gradient` and `weight_gradient`, in one pass."""
    through, dweight = whole_backward_of(Operands.contiguous(dy, x, None, rstd, weight, dx))
    return through, dweight
