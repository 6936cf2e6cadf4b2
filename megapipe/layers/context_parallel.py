"""Attention over samples whose tokens are on several ranks: ring attention and all-to-all attention.

Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay on their rank of a group, while keys and values pass
around the ring. Each rank starts with its own keys; a hop of the ring overlaps the products with the keys of the
previous hop. Under a causal mask each rank has tokens of the head and of the tail (spec/token_order.py), and masked
products are skipped, so that every rank has the same work at every hop. Pieces are merged by their log-sums, in fp32.
In the backward keys and values pass around the ring a second time, and the gradients of a rank's keys and values
travel with them, in fp32, from the first rank that adds to them to their owner. All ranks start these passes in the
same order, forward and backward, because they have the same schedule; this excludes deadlocks.

All-to-all attention (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509, section 3): before attention, the ranks
of a group exchange heads for tokens: a rank sends all heads but its own part, for its tokens, and receives its own
heads for all tokens. Attention to whole samples then runs unchanged, and its result is sent back in the same way.
Ranks hold their tokens in rank order (`contiguous` in spec/token_order.py).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.layers.attention import Attention, narrowed, widened
from megapipe.layers.attention_pieces import Part, Seen, Weighing, merged_pieces, piece_backward, sink_gradient
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import Group, SoloGroup, Work
from megapipe.spec.attention import kv_copies
from megapipe.spec.ops import ContextAttention
from megapipe.spec.token_order import Piece, Share, TokenOrder, Visibility, order_of, pieces


@dataclass(frozen=True)
class Ring:
    """The attention of one block in pieces, over the ranks of a group. With one rank, samples are whole."""

    attention: Attention
    group: Group
    order: TokenOrder

    @property
    def share(self) -> Share:
        """The tokens that this rank holds."""
        return Share(self.order, self.group.rank, self.group.size)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention outputs [b, s, heads, d'] for query [b, s, kv heads, heads of each, d], key
        [b, s, kv heads, 1, d] and value [b, s, kv heads, 1, d'], all of this rank's tokens."""
        channels, value = value.shape[-1], widened(value, query)
        query, key, value = (x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))
        # Pass no tape: the graph refers to the pass, and a tape to the graph, so they would form a reference cycle.
        known = replace(context, tape=None)
        sinks = self.attention.own_sinks(context.tape)
        mixed: Tensor = _Ring.apply(query, key, value, sinks, Pass(self, known, query.shape[2]))
        return narrowed(mixed.transpose(1, 2), channels)


@dataclass(frozen=True)
class Pass:
    """The work of each rank of a ring on one micro-batch, while keys and values pass around once. num_local: tokens of
    a sample on each rank."""

    ring: Ring
    context: MicrobatchContext
    num_local: int

    @property
    def group(self) -> Group:
        """The ranks that hold the samples."""
        return self.ring.group

    def work(self, key_rank: int, device: torch.device) -> Iterator[tuple[Piece, Seen, Weighing]]:
        """Return the pieces that this rank computes with the keys of `key_rank`."""
        ring = self.ring
        lengths = self.context.lengths if isinstance(self.context, BertContext) else None
        masked = self.context.document_starts is not None or lengths is not None
        visibility = Visibility(ring.attention.causal, ring.attention.window, masked)
        rank, size = ring.group.rank, ring.group.size
        numbers = _numbers(ring.order, size, self.num_local * size, device)
        for piece in pieces(visibility, ring.order, rank, key_rank, size, self.num_local):
            queries = numbers[rank, piece.queries.start : piece.queries.stop]
            keys = numbers[key_rank, piece.keys.start : piece.keys.stop]
            yield piece, *seen_and_weighed(ring.attention, self.context, piece, queries, keys, self.num_local * size)


def seen_and_weighed(
    attention: Attention, context: MicrobatchContext, piece: Piece, queries: Tensor, keys: Tensor, length: int
) -> tuple[Seen, Weighing]:
    """Return which keys of a piece its queries see, both given as int64 positions in samples of `length` tokens, and
    how weights are computed from scores."""
    seen = Seen(causal=piece.kind == "causal")
    if piece.kind == "masked":
        seen = Seen(visible=_visible(attention, context, piece, queries, keys))
    weighing = attention.weighing(queries, keys)
    if not attention.dropout.active(context):
        return seen, weighing

    def drop(weights: Tensor) -> Tensor:
        return attention.dropout.drop_weights(weights, attention.first_head, queries, keys, length, context)

    return seen, replace(weighing, drop=drop)


def _visible(attention: Attention, context: MicrobatchContext, piece: Piece, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys the queries see, bool [b or 1, 1, rows, columns]; both are int64 positions of tokens."""
    visible = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
    queries = queries.unsqueeze(1)
    if attention.causal:
        visible = visible & (keys <= queries)
    if attention.window is not None:
        visible = visible & ((queries - keys).abs() < attention.window)
    if context.document_starts is not None:
        starts = context.document_starts[:, None, piece.queries.start : piece.queries.stop, None]
        visible = visible & (keys >= starts)
    if isinstance(context, BertContext) and context.lengths is not None:
        visible = visible & (keys < context.lengths[:, None, None, None])
    return visible


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, once: "Pass | WholeSamples"
    ) -> Tensor:
        mixed, log_sum = merged_pieces(query, sinks, _pieces_in_turn(key, value, once))
        # Kernels need finite values, also for queries that have seen no key.
        ctx.save_for_backward(query, key, value, sinks, mixed, log_sum.masked_fill_(log_sum == -math.inf, 0.0))
        ctx.once = once
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mixed, log_sum = ctx.saved_tensors
        once: Pass | WholeSamples = ctx.once
        dquery = torch.zeros_like(query, dtype=log_sum.dtype)
        shape = (2, *key.shape)
        own, travelling = (torch.zeros(shape, dtype=log_sum.dtype, device=key.device) for _ in range(2))
        arriving: Work | None = None
        group = once.group
        for key_rank, (keys, values) in _blocks_in_turn(key, value, group):
            partial = own if key_rank == group.rank else torch.zeros_like(own)
            for piece, seen, weighing in once.work(key_rank, query.device):
                rows, columns = _slice(piece.queries), _slice(piece.keys)
                dy, q, y, sums = (each[:, :, rows] for each in (gradient, query, mixed, log_sum))
                part = piece_backward(dy, q, keys[:, :, columns], values[:, :, columns], y, sums, seen, weighing)
                dquery[:, :, rows] += part[0]
                partial[0][:, :, columns] += part[1]
                partial[1][:, :, columns] += part[2]
            if key_rank == group.rank:
                continue
            if arriving is not None:
                arriving.wait()
                partial += travelling
            arriving = group.shift(partial, travelling)
        if arriving is not None:
            arriving.wait()
            own += travelling
        dkey, dvalue = own.to(key.dtype)
        dsinks = None if sinks is None else sink_gradient(gradient, mixed, log_sum, sinks)
        return dquery.to(query.dtype), dkey, dvalue, dsinks, None


def _pieces_in_turn(key: Tensor, value: Tensor, once: "Pass | WholeSamples") -> Iterator[Part]:
    """Yield the pieces with the keys and values of every rank."""
    for key_rank, (keys, values) in _blocks_in_turn(key, value, once.group):
        for piece, seen, weighing in once.work(key_rank, key.device):
            columns = _slice(piece.keys)
            yield piece.queries, keys[:, :, columns], values[:, :, columns], seen, weighing


def _blocks_in_turn(key: Tensor, value: Tensor, group: Group) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield each rank with its keys and values, each [b, kv heads, s, d], from this rank backwards through the ring.

    The next ones are in transit while the caller works on the current ones.
    """
    if group.size == 1:
        yield group.rank, (key, value)
        return
    block = torch.stack([key, value])
    for step in range(group.size):
        following, work = block, None
        if step + 1 < group.size:
            following = torch.empty_like(block)
            work = group.shift(block, following)
        yield (group.rank - step) % group.size, block.unbind()
        if work is not None:
            work.wait()
        block = following


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


@functools.lru_cache(maxsize=8)
def _numbers(order: TokenOrder, size: int, length: int, device: torch.device) -> Tensor:
    """Return the token positions of every rank, int64 [size, length / size]."""
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        held = [Share(order, rank, size).numbers(length) for rank in range(size)]
        return torch.from_numpy(np.stack(held)).to(device)


@dataclass(frozen=True)
class HeadExchange:
    """The attention of one block, with its heads sharded over a group."""

    attention: Attention
    group: Group

    @property
    def share(self) -> Share:
        """The tokens that this rank holds."""
        return Share("contiguous", self.group.rank, self.group.size)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention outputs [b, s, heads, d'] for query [b, s, kv heads, heads of each, d], key
        [b, s, kv heads, 1, d] and value [b, s, kv heads, 1, d'], all of this rank's tokens."""
        channels, value = value.shape[-1], widened(value, query)
        batch, length, groups, heads, width = query.shape
        copies = kv_copies(groups, heads, self.group.size)
        if copies > 1:
            query = query.reshape(batch, length, groups * copies, heads // copies, width)
            key, value = (part.repeat_interleave(copies, dim=2) for part in (key, value))
        whole = self._tokens_for_heads(torch.cat([query, key, value], dim=3))
        query, key, value = whole.split([query.shape[3], 1, 1], dim=3)
        everything = replace(context, token_numbers=None, document_starts=context.whole_document_starts)
        mixed = narrowed(self.attention.mix(query, key, value, everything), channels)
        return self._heads_for_tokens(mixed.reshape(batch, self.group.size * length, -1, channels))

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        """Map [b, s, kv heads, n, d] of this rank's tokens to [b, size x s, kv heads / size, n, d]."""
        batch, length, groups, rows, width = x.shape
        size = self.group.size
        cut = x.view(batch, length, size, groups // size, rows, width)
        by_rank = all_to_all(cut.permute(2, 0, 1, 3, 4, 5).contiguous(), self.group)
        return by_rank.transpose(0, 1).reshape(batch, size * length, groups // size, rows, width)

    def _heads_for_tokens(self, x: Tensor) -> Tensor:
        """Map [b, size x s, heads / size, d] to [b, s, heads, d] of this rank's tokens."""
        batch, whole, heads, width = x.shape
        size = self.group.size
        cut = x.view(batch, size, whole // size, heads, width)
        by_rank = all_to_all(cut.transpose(0, 1).contiguous(), self.group)
        return by_rank.permute(1, 2, 0, 3, 4).reshape(batch, whole // size, size * heads, width)


def share_samples(attention: Attention, group: Group, kind: ContextAttention) -> None:
    """Let `attention` work over the ranks of `group`, each of which has a part of every sample.

    spec/token_order.py defines the parts; their order depends on the kind.
    """
    if kind == "ring":
        attention.sharing = Ring(attention, group, order_of(kind, attention.causal))
        return
    attention.sharing = HeadExchange(attention, group)
    attention.num_heads //= group.size
    attention.first_head += group.rank * attention.num_heads
    attention.own_heads = slice(group.rank * attention.num_heads, (group.rank + 1) * attention.num_heads)


def attend_in_pieces(attention: Attention) -> None:
    """Let `attention` to whole samples run as a ring of one rank, which saves no attention weights."""
    attention.in_pieces = Ring(attention, SoloGroup("context"), "contiguous")


@dataclass(frozen=True)
class WholeSamples:
    """A ring over samples without documents or padding, for attention in a user's module.

    scale: factor of scores. num_local: tokens of a sample on each rank."""

    share: Share
    group: Group
    causal: bool
    scale: float
    num_local: int

    def work(self, key_rank: int, device: torch.device) -> Iterator[tuple[Piece, Seen, Weighing]]:
        """Return the pieces that this rank computes with the keys of `key_rank`."""
        order, rank, size = self.share.order, self.share.rank, self.share.size
        for piece in pieces(Visibility(self.causal), order, rank, key_rank, size, self.num_local):
            yield piece, Seen(causal=piece.kind == "causal"), Weighing(self.scale)


class DotProductAttention(nn.Module):
    """Scaled dot-product attention that may run on parts of samples, for a user's modules.

    In one process it is `torch.nn.functional.scaled_dot_product_attention`. On a mesh with context ranks,
    `megapipe.Pipeline` lets each rank hold a part of every sample, and keys and values pass around a ring of those
    ranks.

    Attributes:
        causal: each token attends to itself and to earlier tokens.
        scale: factor of scores; None for one over the square root of the head dimension.

    Example:
        >>> import torch
        >>> from megapipe import DotProductAttention
        >>> attention = DotProductAttention(causal=True)
        >>> query, key = torch.ones(2, 4, 8, 16), torch.ones(2, 1, 8, 16)
        >>> attention(query, key, key).shape
        torch.Size([2, 4, 8, 16])
    """

    def __init__(self, *, causal: bool, scale: float | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale
        self._shared: tuple[Share, Group] | None = None

    def share_samples(self, share: Share, group: Group) -> None:
        """Let this attention work over the ranks of `group`, each of which has a part of every sample; `share` is this
        rank's."""
        self._shared = share, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return outputs [b, heads, s, d'] for query [b, heads, s, d], key [b, kv heads, s, d] and value
        [b, kv heads, s, d'], all of this rank's tokens; the number of heads is a multiple of the number of kv heads.
        """
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if self._shared is None:
            grouped = query.shape[1] != key.shape[1]
            return whole_attention(query, key, value, is_causal=self.causal, scale=scale, enable_gqa=grouped)
        once = WholeSamples(*self._shared, self.causal, scale, query.shape[2])
        mixed: Tensor = _Ring.apply(query, key, widened(value, query), None, once)
        return narrowed(mixed, value.shape[-1])


whole_attention = torch.ops.aten.scaled_dot_product_attention
"""The operator of torch's attention. The trial of a user's layers distinguishes `DotProductAttention`, which supports
context ranks, from a layer's own call of torch's function."""


def keep_rings_out_of_graphs(module: nn.Module) -> bool:
    """Prepare a module for torch.compile, and return whether it can still be one graph.

    A graph cannot express hops that run during products, so torch.compile must not trace a ring. Ring.mix is not
    decorated itself, because the decorator imports the compiler and Triton, which takes seconds in every run, and is
    too late for TRITON_INTERPRET.
    """
    whole = True
    for part in module.modules():
        for name in ("sharing", "in_pieces") if isinstance(part, Attention) else ():
            if isinstance(ring := getattr(part, name), Ring):
                setattr(part, name, SimpleNamespace(mix=torch.compiler.disable(ring.mix), share=ring.share))
                whole = False
    return whole
