"""A linear layer for each of several experts, on rows that come expert by expert."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.linear import Shapes, as_matrix, empty_parameter
from megapipe.layers.remade import Remade, save_input, saved_input
from megapipe.layers.split import SplitModule, SplitTape

Counts = Sequence[int]
"""Rows of each expert, in order; they may be 0."""


class GroupedLinear(SplitModule):
    """y = x W_e^T + b_e for the rows x of expert e.

    shapes: of `weight` [experts, ..., in], all axes between being output axes, and, where there is one, of `bias`
    [experts, ...]: of this rank's experts. Parameters are left unbound on the meta device.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None

    def forward(self, x: Tensor, counts: Counts, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """Rows [n, in] to [n, out], output axes flattened into one.

        again: makes x again for the gradient of W, so that x need not be kept.
        """
        if tape is None:
            return _FusedGroupedLinear.apply(x, self.weight, self.bias, counts, again)
        width = self.weight[0].numel() // self.weight.shape[-1]
        record = tape.record(self, (len(x), width), x)
        record.saved, record.again = ((x.detach(),), None) if again is None else (again.sources, again)
        record.beside = (torch.tensor(counts),)
        bias = None if self.bias is None else self.bias.detach()
        return _ProbedGroupedLinear.apply(x, record.probe, self.weight.detach(), bias, counts)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        x, counts = saved
        yield self.weight, weight_gradients(x, gradient, counts.tolist()).view(self.weight.shape)
        if self.bias is not None:
            yield self.bias, bias_gradients(gradient, counts.tolist()).view(self.bias.shape)


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts) -> Tensor:
    """[n, out] of rows x [n, in], with weight [experts, ..., in] and bias [experts, ...]."""
    y = x.new_empty(len(x), weight[0].numel() // weight.shape[-1])
    for expert, rows in _spans(counts):
        matrix = as_matrix(weight[expert]).t()
        if bias is None:
            torch.mm(x[rows], matrix, out=y[rows])
        else:
            torch.addmm(bias[expert].flatten(), x[rows], matrix, out=y[rows])
    return y


def input_gradients(dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """[n, in] for output gradients dy [n, out]."""
    dx = dy.new_empty(len(dy), weight.shape[-1])
    for expert, rows in _spans(counts):
        torch.mm(dy[rows], as_matrix(weight[expert]), out=dx[rows])
    return dx


def weight_gradients(x: Tensor, dy: Tensor, counts: Counts) -> Tensor:
    """[experts, out, in]; zeros for an expert without rows."""
    found = x.new_zeros(len(counts), dy.shape[-1], x.shape[-1])
    for expert, rows in _spans(counts):
        torch.mm(dy[rows].t(), x[rows], out=found[expert])
    return found


def bias_gradients(dy: Tensor, counts: Counts) -> Tensor:
    """[experts, out]; zeros for an expert without rows."""
    found = dy.new_zeros(len(counts), dy.shape[-1])
    for expert, rows in _spans(counts):
        torch.sum(dy[rows], 0, out=found[expert])
    return found


def _spans(counts: Counts) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with their place."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


class _FusedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts, again: Remade | None
    ) -> Tensor:
        save_input(ctx, x, again, weight)
        ctx.counts = counts
        ctx.bias_shape = None if bias is None else bias.shape
        return outputs(x, weight, bias, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = input_gradients(dy, weight, ctx.counts) if needs_x else None
        dweight = None
        if needs_weight:
            x = saved_input(ctx, kept)
            dweight = weight_gradients(x, dy, ctx.counts).view(weight.shape)
        dbias = bias_gradients(dy, ctx.counts).view(ctx.bias_shape) if needs_bias else None
        return dx, dweight, dbias, None, None


class _ProbedGroupedLinear(torch.autograd.Function):
    """The input half: weight and bias come detached, the probe receives dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.counts = counts
        return outputs(x, weight, bias, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        dx = input_gradients(dy, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        return dx, dy, None, None, None
