"""Checks of ops that are one differentiable function, `apply`: values and gradients against float64 and torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.kernels.cases import assert_as_exact_as_torch, assert_same_bits, draw

Function = Callable[..., Tensor]


def results(function: Function, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """The value of a function and the gradients of its inputs, all of which are float tensors."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.view(y.shape))]


def check_exactness(function: Function, reference: Function, inputs: Sequence[Tensor], width: int) -> None:
    """At most twice torch's own errors in values and gradients, and the same bits on two runs.

    reference: takes the inputs, in their dtype and in float64. width: of the result's rows.
    """
    rows = inputs[0].shape[:-1]
    dy = draw(*rows, width, seed=9, dtype=inputs[0].dtype, device=inputs[0].device.type)
    found = results(function, inputs, dy)
    torchs = results(reference, inputs, dy)
    exact = results(reference, [x.double() for x in inputs], dy.double())
    for ours, theirs, truth in zip(found, torchs, exact, strict=True):
        assert_as_exact_as_torch(ours, theirs, truth)
    for first, second in zip(found, results(function, inputs, dy), strict=True):
        assert_same_bits(first, second)


def check_layout(function: Function, inputs: Sequence[Tensor], width: int, layout: Callable[[Tensor], Tensor]) -> None:
    """The same bits however the inputs and the gradient lie in memory."""
    dy = draw(*inputs[0].shape[:-1], width, seed=9, dtype=inputs[0].dtype, device=inputs[0].device.type)
    plain = results(function, inputs, dy)
    for first, second in zip(plain, results(function, [layout(x) for x in inputs], layout(dy)), strict=True):
        assert_same_bits(first, second)


def check_like_double(function: Function, reference: Function, inputs: Sequence[Tensor], width: int) -> None:
    """NaN and infinite exactly where float64 is, and close elsewhere: for numbers beyond the ordinary.

    Not torch in the same dtype, whose erf of infinity is NaN on the CPU.
    """
    dy = torch.ones(*inputs[0].shape[:-1], width, dtype=inputs[0].dtype, device=inputs[0].device)
    exact = results(reference, [x.double() for x in inputs], dy.double())
    for ours, truth in zip(results(function, inputs, dy), exact, strict=True):
        relative = 2e-2 if ours.itemsize == 2 else 1e-5
        torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=relative, atol=1e-6, equal_nan=True)


def check_compiled(function: Function, inputs: Sequence[Tensor], width: int) -> None:
    """One graph without a break, forward and backward, that gives the same bits as eager calls."""
    dy = draw(*inputs[0].shape[:-1], width, seed=9, dtype=inputs[0].dtype, device=inputs[0].device.type)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for first, second in zip(results(compiled, inputs, dy), results(function, inputs, dy), strict=True):
        assert_same_bits(first, second)
