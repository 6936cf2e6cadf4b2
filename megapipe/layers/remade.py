"""Tensors that a backward makes again from what is kept anyway (Korthikanti et al. 2022, 2205.05198, section 5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Remade:
    """How to make a tensor again, with the same bits.

    make: pure. sources: what it takes, cut out of the graph; others keep them for their own backward.
    """

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        """The tensor."""
        with torch.no_grad():
            return self.make(*self.sources)


def save_input(ctx: Any, x: Tensor, again: Remade | None, *others: Tensor) -> None:
    """Save for `saved_input` what an operation's backward needs: `others`, and x or what makes it again.

    Autograd frees saved tensors as soon as the operation's backward is over; what else a node refers to lives for as
    long as the graph.
    """
    ctx.make = None if again is None else again.make
    ctx.save_for_backward(*others, *((x,) if again is None else again.sources))


def saved_input(ctx: Any, saved: Sequence[Tensor]) -> Tensor:
    """The input x, from what `save_input` saved after `others`."""
    return saved[0] if ctx.make is None else Remade(ctx.make, tuple(saved))()


class _RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.function = function
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.function(*leaves)
        return None, *torch.autograd.grad(output, leaves, gradient)


def run_again(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of tensors that all require grad, keeping them alone: the backward runs it again.

    function: without parameters, with the same bits every time.
    """
    output: Tensor = _RunAgain.apply(function, *tensors)
    return output
