"""Layer normalisation in Triton: the functions and arguments of `megapipe.kernels.reference.layer_norm`.

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


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), statistic_of(x), statistic_of(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight)
    ctx.mark_non_differentiable(mean, rstd)


def _forward_backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, rstd, weight = ctx.saved_tensors
    return *backward(dy, x, mean, rstd, weight), None


@opaque(
    "layer_norm_triton(Tensor x, Tensor weight, Tensor bias, float epsilon) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, mean [..., 1], reciprocal standard deviation [..., 1])."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y, mean, rstd = torch.empty_like(x), statistic_of(x), statistic_of(x)
    forward_launch(x, None, weight, bias, y, None, mean, rstd, epsilon).run()
    return y, mean, rstd


def _fake_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _fake_forward(x, weight, bias, epsilon)
    return y, torch.empty_like(y), mean, rstd


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, inputs[2])
    ctx.mark_non_differentiable(mean, rstd)


def _add_forward_backward(ctx: Any, dy: Tensor, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight = ctx.saved_tensors
    dx, dweight, dbias = backward(dy, total, mean, rstd, weight, dtotal)
    return dx, dx, dweight, dbias, None


@opaque(
    "layer_norm_triton_add(Tensor x, Tensor residual, Tensor weight, Tensor bias, float epsilon)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_add_forward,
    _keep_sum,
    _add_forward_backward,
)
def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; mean and reciprocal deviation of the sum)."""
    x, residual, weight, bias = (tensor.contiguous() for tensor in (x, residual, weight, bias))
    y, total, mean, rstd = torch.empty_like(x), torch.empty_like(x), statistic_of(x), statistic_of(x)
    forward_launch(x, residual, weight, bias, y, total, mean, rstd, epsilon).run()
    return y, total, mean, rstd


@opaque(
    "layer_norm_triton_input_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dx=None)"
    " -> Tensor",
    lambda dy, x, mean, rstd, weight, dx=None: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return input_gradient_of(Operands.contiguous(dy, x, mean, rstd, weight, dx))


@opaque(
    "layer_norm_triton_weight_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight)"
    " -> (Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight: (torch.empty_like(weight), torch.empty_like(weight)),
)
def weight_gradient(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias [h], summed over all other axes in fp32, in the weight's dtype."""
    dweight, dbias = weight_gradients_of(Operands.contiguous(dy, x, mean, rstd, weight))
    return dweight, dbias


@opaque(
    "layer_norm_triton_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dx=None)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight, dx=None: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight),
        torch.empty_like(weight),
    ),
)
def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias: the bits of `input_gradient` and `weight_gradient`, in one pass."""
    through, dweight, dbias = whole_backward_of(Operands.contiguous(dy, x, mean, rstd, weight, dx))
    return through, dweight, dbias
