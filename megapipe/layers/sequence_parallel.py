"""Matrix products at the ends of a tensor-parallel region whose tokens are sharded outside of it (2205.05198, 4.2.2).

Column-parallel products gather the tokens and scatter the sum of their gradients; row-parallel products do the
reverse. Only the rank's own shard of an input is saved; the input is gathered a second time during the product that
computes its gradient. With several chunks, a chunk is gathered while the previous one is multiplied, and scattered
while the next one is; in fp8 it has its own scales.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.linear import Linear, Products, SequenceShards, bias_gradient
from megapipe.layers.split import Rerun, SplitTape, save_input, saved_input
from megapipe.parallel.collectives import by_rank, joined, start_gather, start_scatter

Multiply = Callable[[Tensor], Tensor]
"""A matrix product: maps [..., in] to [..., out]."""


@dataclass(frozen=True, eq=False)
class SequenceProducts(SequenceShards):
    """Products of linear layers between shards of the tokens and whole samples."""

    def column(
        self, linear: Linear, x: Tensor, tape: SplitTape | None, *, add_bias: bool, rerun: Rerun | None
    ) -> Tensor:
        """Map x [b, s / t, in] to this rank's channels [b, s, out / t] of all tokens. Arguments as in
        `local_product`."""
        if tape is None:
            return _ColumnFused.apply(x, linear.weight, linear.bias, add_bias, rerun, self, linear.products)
        width = linear.weight.numel() // linear.weight.shape[-1]
        record = tape.record(linear, (x.shape[0], x.shape[1] * self.group.size, width), x)
        record.keep_input(x, rerun)
        bias = linear.bias.detach() if linear.bias is not None and add_bias else None
        return _ColumnProbed.apply(x, record.probe, linear.weight.detach(), bias, self, linear.products)

    def row(self, linear: Linear, x: Tensor, tape: SplitTape | None, *, rerun: Rerun | None) -> Tensor:
        """Map this rank's channels x [b, s, in / t] of all tokens to [b, s / t, out], without the bias."""
        if tape is None:
            return _RowFused.apply(x, linear.weight, linear.bias, rerun, self, linear.products)
        width = linear.weight.numel() // linear.weight.shape[-1]
        record = tape.record(linear, (x.shape[0], x.shape[1] // self.group.size, width), x)
        record.keep_input(x, rerun)
        return _RowProbed.apply(x, record.probe, linear.weight.detach(), self, linear.products)

    def column_weight_half(
        self, linear: Linear, shard: Tensor, gradient: Tensor
    ) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Return what `SplitModule.weight_half` returns. shard: of the input. gradient: of the output, for all
        tokens."""
        gathered = start_gather(shard, self.group)
        if linear.bias is not None:
            yield linear.bias, bias_gradient(gradient)
        tokens = joined(gathered())
        del gathered  # it refers to the tensor of which `tokens` may be a copy
        yield from linear.weight_gradients(tokens, gradient)

    def row_weight_half(self, linear: Linear, x: Tensor, shard: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Return what `SplitModule.weight_half` returns. x: the input, for all tokens. shard: of the output's
        gradient."""
        gathered = start_gather(shard, self.group)
        if linear.bias is not None:
            yield linear.bias, bias_gradient(shard)
        tokens = joined(gathered())
        del gathered
        yield from linear.weight_gradients(x, tokens)

    def gathered(self, x: Tensor, multiply: Multiply, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the product [b, s, out] of all ranks' tokens x [b, s / t, in] and, if `keep`, the tokens [b, s,
        in]."""
        if self.chunks == 1:
            everything = joined(start_gather(x, self.group)())
            return multiply(everything), everything if keep else None
        pieces = x.tensor_split(self.chunks, dim=1)
        coming = start_gather(pieces[0], self.group)
        products, inputs = [], []
        for index in range(self.chunks):
            piece = coming()
            if index + 1 < self.chunks:
                coming = start_gather(pieces[index + 1], self.group)
            products.append(multiply(piece))
            if keep:
                inputs.append(piece)
        # Each is [t, b, n, channels] and has n tokens of every rank's shard.
        return joined(torch.cat(products, dim=2)), joined(torch.cat(inputs, dim=2)) if keep else None

    def start_scattered(self, x: Tensor, multiply: Multiply) -> Callable[[], Tensor]:
        """Start summing the ranks' products of x [b, s, in]; return a function that waits for [b, s / t, out].

        The last chunk is still in progress on return.
        """
        if self.chunks == 1:
            return start_scatter(by_rank(multiply(x), self.group.size), self.group)
        pieces = by_rank(x, self.group.size).tensor_split(self.chunks, dim=2)
        under_way = [start_scatter(multiply(piece), self.group) for piece in pieces]
        return lambda: torch.cat([finish() for finish in under_way], dim=1)


class _ColumnFused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        add_bias: bool,
        rerun: Rerun | None,
        sequence: SequenceProducts,
        products: Products,
    ) -> Tensor:
        save_input(ctx, x, rerun, weight)
        ctx.sequence, ctx.products = sequence, products
        ctx.accumulator = products.accumulator_of(weight)
        ctx.bias_shape = None if bias is None else bias.shape
        multiply = partial(products.output, weight=weight, bias=bias if add_bias else None)
        return sequence.gathered(x, multiply, keep=False)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dweight = gathered = scattered = None
        dy = dy.contiguous()
        if needs_weight:
            gathered = start_gather(saved_input(ctx, kept), ctx.sequence.group)
        if needs_x:
            scattered = ctx.sequence.start_scattered(dy, partial(ctx.products.input_gradient, weight=weight))
        if gathered is not None:
            dweight = ctx.products.gradient(joined(gathered()), dy, weight, ctx.accumulator)
        dbias = bias_gradient(dy).view(ctx.bias_shape) if needs_bias else None
        if scattered is not None:
            dx = scattered()
        return dx, dweight, dbias, None, None, None, None


class _ColumnProbed(torch.autograd.Function):
    """The forward and the input half of a split backward. Weight and bias are detached; the probe receives the
    gradient dy of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probe: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceProducts,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.sequence, ctx.products = sequence, products
        return sequence.gathered(x, partial(products.output, weight=weight, bias=bias), keep=False)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        dy = dy.contiguous()
        multiply = partial(ctx.products.input_gradient, weight=weight)
        dx = ctx.sequence.start_scattered(dy, multiply)() if ctx.needs_input_grad[0] else None
        return dx, dy, None, None, None, None


class _RowFused(torch.autograd.Function):
    """The bias's gradient is computed here; the bias is added later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rerun: Rerun | None,
        sequence: SequenceProducts,
        products: Products,
    ) -> Tensor:
        save_input(ctx, x, rerun, weight)
        ctx.sequence, ctx.products = sequence, products
        ctx.accumulator = products.accumulator_of(weight)
        ctx.bias_shape = None if bias is None else bias.shape
        return sequence.start_scattered(x, partial(products.output, weight=weight, bias=None))()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        multiply = partial(ctx.products.input_gradient, weight=weight)
        dx, everything = ctx.sequence.gathered(dy, multiply, keep=needs_weight)
        dweight = None
        if everything is not None:
            x = saved_input(ctx, kept)
            dweight = ctx.products.gradient(x, everything, weight, ctx.accumulator)
        dbias = bias_gradient(dy).view(ctx.bias_shape) if needs_bias else None
        return dx, dweight, dbias, None, None, None


class _RowProbed(torch.autograd.Function):
    """The forward and the input half of a split backward. The weight is detached; the probe receives the gradient dy
    of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probe: Tensor, weight: Tensor, sequence: SequenceProducts, products: Products
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.sequence, ctx.products = sequence, products
        return sequence.start_scattered(x, partial(products.output, weight=weight, bias=None))()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        multiply = partial(ctx.products.input_gradient, weight=weight)
        return ctx.sequence.gathered(dy, multiply, keep=False)[0], dy, None, None, None
