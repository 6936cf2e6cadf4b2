"""Linear layers whose matrix is shared by the ranks of a tensor group (Shoeybi et al. 2019, 1909.08053, section 3).

Parameters keep their canonical shape, all axes but the last being output axes, and are seen as matrices inside.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.kernels.opaque import opaque
from megapipe.kernels.registry import Registry
from megapipe.layers.remade import Remade, save_input, saved_input
from megapipe.layers.sequence_shard import OnShards
from megapipe.layers.split import SplitModule, SplitTape
from megapipe.parallel.collectives import copy_to_group, reduce_from_group
from megapipe.parallel.groups import Group

Shapes = Mapping[str, tuple[int, ...]]
"""Attribute path within a module -> shape of the parameter as this rank stores it."""


def within(shapes: Shapes, module: str) -> Shapes:
    """The shapes of the parameters inside the submodule `module`, by their path there."""
    prefix = f"{module}."
    return {path.removeprefix(prefix): shape for path, shape in shapes.items() if path.startswith(prefix)}


def empty_parameter(shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter without storage or values: its owner binds it to memory."""
    return nn.Parameter(torch.empty(shape, device="meta"))


@opaque(
    "linear_weight_gradient(Tensor x, Tensor dy) -> Tensor",
    lambda x, dy: x.new_empty(dy.shape[-1], x.shape[-1]),
)
def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient [out, in] of the matrix, for input x [..., in] and output gradient dy [..., out]."""
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


@opaque(
    "linear_bias_gradient(Tensor dy) -> Tensor",
    lambda dy: dy.new_empty(dy.shape[-1]),
)
def bias_gradient(dy: Tensor) -> Tensor:
    """Gradient [out] of the bias."""
    return dy.flatten(0, -2).sum(0)


def as_matrix(weight: Tensor) -> Tensor:
    """[out, in] view of a weight in canonical shape [..., in]."""
    return weight.view(-1, weight.shape[-1])


class Products:
    """The three matrix products of a linear layer, in the dtype of its operands. x: [..., in]. dy: [..., out]."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., out]."""
        return functional.linear(x, as_matrix(weight), None if bias is None else bias.view(-1))

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., in]."""
        return dy @ as_matrix(weight)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """[out, in]."""
        return weight_gradient(x, dy)

    def accumulator_of(self, weight: Tensor) -> Tensor | None:
        """The parameter whose `.grad` these products are added to as they are computed, or None."""
        return None

    def gradient(self, x: Tensor, dy: Tensor, weight: Tensor, accumulator: Tensor | None) -> Tensor | None:
        """Gradient of the weight in its shape, or None if it has been added to the accumulator's `.grad`."""
        return self.weight_gradient(x, dy).view(weight.shape)


PLAIN = Products()


class AccumulatingProducts(Products):
    """Products whose weight gradients the kernel registry's `weight_gradient` adds to the accumulators.

    Autograd would add them later, after they were rounded to the dtype of the product.
    """

    def __init__(self, kernels: Registry) -> None:
        self._kernels = kernels

    def accumulator_of(self, weight: Tensor) -> Tensor | None:
        return weight

    def gradient(self, x: Tensor, dy: Tensor, weight: Tensor, accumulator: Tensor | None) -> Tensor | None:
        total = None if accumulator is None else accumulator.grad
        if total is None:
            return super().gradient(x, dy, weight, None)
        self._kernels.pick("weight_gradient", x).accumulate(x, dy, as_matrix(total))
        return None


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        add_bias: bool,
        again: Remade | None,
        products: Products,
    ) -> Tensor:
        save_input(ctx, x, again, weight)
        ctx.products = products
        ctx.accumulator = products.accumulator_of(weight)
        ctx.bias_shape = None if bias is None else bias.shape
        return products.output(x, weight, bias if add_bias else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = ctx.products.input_gradient(dy, weight) if needs_x else None
        dweight = None
        if needs_weight:
            x = saved_input(ctx, kept)
            dweight = ctx.products.gradient(x, dy, weight, ctx.accumulator)
        dbias = bias_gradient(dy).view(ctx.bias_shape) if needs_bias else None
        return dx, dweight, dbias, None, None, None


class _ProbedLinear(torch.autograd.Function):
    """The input half: weight and bias come detached, the probe receives dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        dx = ctx.products.input_gradient(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, dy, None, None, None


class Linear(SplitModule):
    """y = x W^T + b with one rank's part of W.

    shapes: of `weight` [..., in] and, where there is a bias, `bias`. Parameters are left unbound on the meta device.
    products: how matrices are multiplied; may be replaced before the first forward.
    """

    def __init__(self, shapes: Shapes, group: Group) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None
        self.group = group
        self.products = PLAIN

    def local_product(
        self, x: Tensor, tape: SplitTape | None, *, add_bias: bool, again: Remade | None = None
    ) -> Tensor:
        """x W^T [..., out], output axes flattened into one. The bias gets its gradient here even if added later.

        again: makes x again for the gradient of W, so that x need not be kept.
        """
        if tape is None:
            return _FusedLinear.apply(x, self.weight, self.bias, add_bias, again, self.products)
        width = self.weight.numel() // self.weight.shape[-1]
        record = tape.record(self, (*x.shape[:-1], width), x)
        if again is None:
            record.saved = (x.detach(),)
        else:
            record.saved, record.again = again.sources, again
        bias = self.bias.detach() if self.bias is not None and add_bias else None
        return _ProbedLinear.apply(x, record.probe, self.weight.detach(), bias, self.products)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        yield from self.weight_gradients(saved[0], gradient)
        if self.bias is not None:
            yield self.bias, bias_gradient(gradient)

    def weight_gradients(self, x: Tensor, dy: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """The weight with its gradient, or nothing if the gradient has been added to the weight's."""
        gradient = self.products.gradient(x, dy, self.weight, self.products.accumulator_of(self.weight))
        if gradient is not None:
            yield self.weight, gradient


class ColumnParallelLinear(Linear, OnShards):
    """A linear layer whose outputs are shared out: every rank has the whole x and computes its own part of y.

    Under sequence parallelism a rank has its own tokens of x, which are gathered first.
    """

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """[..., in] to this rank's [..., out / size], output axes flattened. again: as in `local_product`."""
        return self._shared_product(x, tape, add_bias=True, again=again)

    def without_bias(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """What `forward` gives before the bias, which the caller adds, detached: its gradient is computed here."""
        return self._shared_product(x, tape, add_bias=False, again=again)

    def _shared_product(self, x: Tensor, tape: SplitTape | None, *, add_bias: bool, again: Remade | None) -> Tensor:
        if self.sequence is not None:
            return self.sequence.column(self, x, tape, add_bias=add_bias, again=again)
        return self.local_product(copy_to_group(x, self.group), tape, add_bias=add_bias, again=again)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        if self.sequence is not None:
            return self.sequence.column_weight_half(self, saved[0], gradient)
        return super().weight_half(saved, gradient)


class RowParallelLinear(Linear, OnShards):
    """A linear layer whose inputs are shared out: the ranks' products are summed, then the bias is added once.

    Under sequence parallelism a rank gets its own tokens of the sum.
    """

    partial = ("bias",)

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """This rank's [..., in / size] to the whole [..., out]. again: as in `local_product`."""
        if self.group.size == 1:
            return self.local_product(x, tape, add_bias=True, again=again)
        if self.sequence is not None:
            y = self.sequence.row(self, x, tape, again=again)
        else:
            y = reduce_from_group(self.local_product(x, tape, add_bias=False, again=again), self.group)
        return y if self.bias is None else y + self.bias.detach()

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        if self.sequence is not None:
            return self.sequence.row_weight_half(self, saved[0], gradient)
        return super().weight_half(saved, gradient)


class ReplicatedLinear(Linear):
    """A linear layer that every rank computes whole, on the same x: small ones, not worth an exchange."""

    def forward(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """[..., in] to [..., out]."""
        return self.local_product(x, tape, add_bias=True)
