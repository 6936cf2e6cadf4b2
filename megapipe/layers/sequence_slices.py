"""Attention for samples that pass through the layers in slices, one after another (Sun et al. 2024, Seq1F1B, arXiv
2406.03488, section 3.2).

The queries of a slice see its own keys and those of earlier slices, which are saved from forward to backward.
Backwards run in reverse order: the backward of a slice adds to the gradients of earlier slices' keys and values, in
fp32, and uses those that later slices have added for its own keys and values. Pieces are those of a ring
(`layers.context_parallel`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megapipe.layers.attention import Attention
from megapipe.layers.attention_pieces import Seen, Weighing, merged_pieces, piece_backward, sink_gradient
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.context_parallel import seen_and_weighed
from megapipe.spec.token_order import Visibility, slice_pieces


@dataclass
class SliceCache:
    """Keys and values that the slices of one micro-batch share, by attention and number of the slice.

    blocks: keys and values [2, b, kv heads, s, d], from the forward of a slice to its backward, except for the last
    slice, whose keys and values no other slice reads. gradients: their gradients, in fp32 (fp64 for fp64), from the
    last slice's backward to the slice's own.
    """

    blocks: dict[Attention, dict[int, Tensor]] = field(default_factory=dict)
    gradients: dict[Attention, dict[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """One slice of the samples of a micro-batch. ranges: positions of the tokens of all slices. number: of this
    slice."""

    ranges: Sequence[range]
    number: int
    cache: SliceCache

    @property
    def places(self) -> range:
        """Positions of this slice's tokens in their samples."""
        return self.ranges[self.number]

    @property
    def whole(self) -> int:
        """Tokens of a whole sample."""
        return self.ranges[-1].stop

    @property
    def is_last(self) -> bool:
        """Whether this is the last slice."""
        return self.number == len(self.ranges) - 1

    def mix(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext
    ) -> Tensor:
        """Return attention outputs [b, s, heads, d] for query [b, s, kv heads, heads of each, d], and key and
        value [b, s, kv heads, 1, d], all of this slice."""
        query, key, value = (x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))
        sinks = attention.own_sinks(context.tape)
        once = SlicePass(self, attention, replace(context, tape=None))
        mixed: Tensor = _Sliced.apply(query, key, value, sinks, once)
        if self.is_last and not context.training:
            self.cache.blocks.pop(attention, None)
        return mixed.transpose(1, 2)


@dataclass(frozen=True)
class SlicePass:
    """The work of one slice in one attention layer."""

    slice: Slice
    attention: Attention
    context: MicrobatchContext

    def work(self, block: Tensor) -> Iterator[tuple[int, Tensor, range, Seen, Weighing]]:
        """Yield the pieces: the number of a slice, its keys and values, the numbers of queries that see some of
        them, which ones these are, and how weights are computed.

        block: keys and values of this slice.
        """
        own, attention, device = self.slice, self.attention, block.device
        visibility = Visibility(True, attention.window, self.context.document_starts is not None)
        earlier = self._of(own.cache.blocks)
        for number in range(own.number + 1):
            places = own.ranges[number]
            keys = torch.arange(places.start, places.stop, device=device)
            for piece in slice_pieces(visibility, own.places, places):
                queries = torch.arange(piece.queries.start, piece.queries.stop, device=device) + own.places.start
                how = seen_and_weighed(attention, self.context, piece, queries, keys, own.whole)
                yield number, block if number == own.number else earlier[number], piece.queries, *how

    def keep(self, block: Tensor) -> None:
        """Save this slice's keys and values for later slices."""
        if not self.slice.is_last:
            self._of(self.slice.cache.blocks)[self.slice.number] = block

    def gradients(self, block: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the gradients of keys and values so far, by slice, up to this one; this slice's are removed from the
        cache."""
        number, by_slice = self.slice.number, self._of(self.slice.cache.gradients)
        if self.slice.is_last:
            shape = (2, *block.shape[1:3])
            for earlier, places in enumerate(self.slice.ranges[:-1]):
                by_slice[earlier] = block.new_zeros((*shape, len(places), block.shape[-1]), dtype=dtype)
        self._of(self.slice.cache.blocks).pop(number, None)
        own = by_slice.pop(number, None)
        return {**by_slice, number: torch.zeros_like(block, dtype=dtype) if own is None else own}

    def _of(self, kept: dict[Attention, dict[int, Tensor]]) -> dict[int, Tensor]:
        return kept.setdefault(self.attention, {})


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, once: SlicePass) -> Tensor:
        block = torch.stack([key, value])
        if query.untyped_storage().nbytes() > query.numel() * query.element_size():
            # A view, which would keep the projection alive.
            query = query.clone(memory_format=torch.contiguous_format)
        parts = ((rows, *both, seen, weighing) for _, both, rows, seen, weighing in once.work(block))
        mixed, log_sum = merged_pieces(query, sinks, parts)
        once.keep(block)
        ctx.save_for_backward(query, block, sinks, mixed, log_sum)
        ctx.once = once
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, block, sinks, mixed, log_sum = ctx.saved_tensors
        once: SlicePass = ctx.once
        dquery = torch.zeros_like(query, dtype=log_sum.dtype)
        pieces = list(once.work(block))
        by_slice = once.gradients(block, log_sum.dtype)
        for number, (keys, values), queries, seen, weighing in pieces:
            rows = slice(queries.start, queries.stop)
            dy, q, y, sums = (each[:, :, rows] for each in (gradient, query, mixed, log_sum))
            part = piece_backward(dy, q, keys, values, y, sums, seen, weighing)
            dquery[:, :, rows] += part[0]
            by_slice[number][0] += part[1]
            by_slice[number][1] += part[2]
        dkey, dvalue = by_slice[once.slice.number].to(block.dtype)
        dsinks = None if sinks is None else sink_gradient(gradient, mixed, log_sum, sinks)
        return dquery.to(query.dtype), dkey, dvalue, dsinks, None


def sliced(context: MicrobatchContext, ranges: Sequence[range]) -> list[MicrobatchContext]:
    """Return a context for each slice of the samples of a micro-batch. ranges: positions of the tokens of each
    slice."""
    if len(ranges) == 1:
        return [context]
    cache, contexts = SliceCache(), []
    device = None if context.ordinals is None else context.ordinals.device
    for number, places in enumerate(ranges):
        numbers = torch.arange(places.start, places.stop, device=device)
        part = replace(context, token_numbers=numbers, slice=Slice(ranges, number, cache))
        for name in ("tokens", "labels", "loss_mask", "document_starts"):
            if (whole := getattr(context, name)) is not None:
                # Contiguous, because otherwise ops would copy them and save the copies for the backward.
                setattr(part, name, whole[:, places.start : places.stop].contiguous())
        contexts.append(part)
    return contexts
