"""Matrix products at the ends of a tensor-parallel region whose tokens are sharded outside of it (2205.05198, 4.2.2).

Column-parallel products gather the tokens and scatter the sum of their gradients; row-parallel products do the
reverse. Only the rank's own shard of an input is saved; the input is gathered a second time during the product that
computes its gradient. With several chunks, a chunk is gathered while the previous one is multiplied, and scattered
while the next one is; in fp8 it has its own scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megapipe.layers.linear import Gradients, Linear, Products, Source, bias_gradient
from megapipe.layers.split import Rerun, SplitTape, WeightGradients
from megapipe.parallel.collectives import by_rank, joined, start_gather, start_scatter
from megapipe.parallel.groups import Group

Multiply = Callable[[Tensor], Tensor]
"""A matrix product: maps [..., in] to [..., out]."""


@dataclass(frozen=True, eq=False)
class SequenceProducts:
    """The ranks over which the tokens of every sample are sharded, and products of linear layers between shards of the
    tokens and whole samples.

    chunks: number of pieces in which the tokens of a matrix product are gathered or scattered, each during the product
    of another piece.
    """

    group: Group
    chunks: int = 1

    def column(
        self, linear: Linear, x: Tensor, tape: SplitTape | None, *, add_bias: bool, rerun: Rerun | None
    ) -> Tensor:
        """Map x [b, s / t, in] to this rank's channels [b, s, out / t] of all tokens. Arguments as in `product`."""
        rows = x.shape[0], x.shape[1] * self.group.size
        products = _ColumnProducts(self, linear.products)
        return linear.product(x, tape, products, rows, rerun, add_bias=add_bias)

    def row(self, linear: Linear, x: Tensor, tape: SplitTape | None, *, rerun: Rerun | None) -> Tensor:
        """Map this rank's channels x [b, s, in / t] of all tokens to [b, s / t, out], without the bias."""
        rows = x.shape[0], x.shape[1] // self.group.size
        products = _RowProducts(self, linear.products)
        return linear.product(x, tape, products, rows, rerun, add_bias=False)

    def weight_half(self, linear: Linear, x: Tensor, gradient: Tensor, *, column: bool) -> WeightGradients:
        """Return what `SplitModule.weight_half` returns. x: the input. gradient: of the output. column: x has this
        rank's shard of the tokens, and the gradient all of them; otherwise the reverse."""
        gathered = start_gather(x if column else gradient, self.group)
        if linear.bias is not None:
            yield linear.bias, bias_gradient(gradient)
        tokens = joined(gathered())
        del gathered  # it refers to the tensor of which `tokens` may be a copy
        yield from linear.weight_gradients(tokens, gradient) if column else linear.weight_gradients(x, tokens)

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


class _OverShards(Products):
    """Products over sharded tokens. inner: the products of a rank."""

    def __init__(self, sequence: SequenceProducts, inner: Products) -> None:
        self.sequence, self.inner = sequence, inner

    def accumulator_of(self, weight: Tensor) -> Tensor | None:
        return self.inner.accumulator_of(weight)


class _ColumnProducts(_OverShards):
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.sequence.gathered(x, partial(self.inner.output, weight=weight, bias=bias), keep=False)[0]

    def received(self, dy: Tensor) -> Tensor:
        return dy.contiguous()

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return self.sequence.start_scattered(dy, partial(self.inner.input_gradient, weight=weight))()

    def backward(
        self, dy: Tensor, weight: Tensor, needed: Sequence[bool], x: Source, accumulator: Tensor | None
    ) -> Gradients:
        dweight = gathered = scattered = None
        if needed[1]:
            gathered = start_gather(x(), self.sequence.group)
        if needed[0]:
            scattered = self.sequence.start_scattered(dy, partial(self.inner.input_gradient, weight=weight))
        if gathered is not None:
            dweight = self.inner.gradient(joined(gathered()), dy, weight, accumulator)
        dbias = self.bias_gradient(dy) if needed[2] else None
        return None if scattered is None else scattered(), dweight, dbias


class _RowProducts(_OverShards):
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.sequence.start_scattered(x, partial(self.inner.output, weight=weight, bias=bias))()

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return self.sequence.gathered(dy, partial(self.inner.input_gradient, weight=weight), keep=False)[0]

    def backward(
        self, dy: Tensor, weight: Tensor, needed: Sequence[bool], x: Source, accumulator: Tensor | None
    ) -> Gradients:
        multiply = partial(self.inner.input_gradient, weight=weight)
        dx, everything = self.sequence.gathered(dy, multiply, keep=needed[1])
        dweight = None if everything is None else self.inner.gradient(x(), everything, weight, accumulator)
        return dx, dweight, self.bias_gradient(dy) if needed[2] else None
