"""Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay on their rank of a group, keys and values go round.

Each rank begins with its own keys; a hop of the ring goes on beside the products with the keys of the hop before.
Under a causal mask tokens lie head and tail together (parallel/token_order.py), and what the mask hides is left out,
so that every rank has the same work at every hop. Pieces are merged by their log-sums, in fp32.

In the backward keys and values go round again, and the gradients of a rank's keys and values travel with them, in
fp32, from the first rank that adds to them to their owner. All ranks call this in the same order, forward and
backward, as their schedules are one; that is all it takes not to wait for each other forever.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapipe.layers.attention_pieces import Seen, Weighing, piece_backward, piece_forward
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.dropout import Dropout
from megapipe.layers.ring_pieces import Piece, Visibility, pieces
from megapipe.layout.token_order import Share, TokenOrder, token_numbers
from megapipe.parallel.groups import Group, Work


@dataclass(frozen=True)
class Ring:
    """The attention of one block, over the ranks of a group.

    visibility: causal mask and window alike for all samples. unfused: no kernels. first_head: global number of the
    first head here, and dropout: of the weights.
    """

    group: Group
    order: TokenOrder
    visibility: Visibility
    scale: float
    unfused: bool
    first_head: int
    dropout: Dropout

    @property
    def share(self) -> Share:
        """The tokens that this rank holds."""
        return Share(self.order, self.group.rank, self.group.size)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [b, s, heads, d] of query [b, s, kv heads, heads of each, d], key and value [b, s, kv heads, 1,
        d], all of the tokens in hand."""
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        # The graph keeps the pass, and a tape keeps the graph: together they would keep each other for ever.
        known = replace(context, tape=None)
        mixed: Tensor = _Ring.apply(query, key, value, Pass(self, known, query.shape[2]))
        return mixed.transpose(1, 2)


@dataclass(frozen=True)
class Pass:
    """A ring on one micro-batch. num_local: tokens of a sample on each rank."""

    ring: Ring
    context: MicrobatchContext
    num_local: int

    def work(self, key_rank: int, device: torch.device) -> Iterator[tuple[Piece, Seen, Weighing]]:
        """What this rank computes with the keys of `key_rank`."""
        ring = self.ring
        lengths = self.context.lengths if isinstance(self.context, BertContext) else None
        masked = self.context.document_starts is not None or lengths is not None
        visibility = Visibility(ring.visibility.causal, ring.visibility.window, masked)
        rank, size = ring.group.rank, ring.group.size
        numbers = _numbers(ring.order, size, self.num_local * size, device)
        for piece in pieces(visibility, ring.order, rank, key_rank, size, self.num_local):
            queries = numbers[rank, piece.queries.start : piece.queries.stop]
            keys = numbers[key_rank, piece.keys.start : piece.keys.stop]
            visible = self._visible(piece, queries, keys, lengths) if piece.kind == "masked" else None
            seen = Seen(causal=piece.kind == "causal", visible=visible)
            yield piece, seen, self._weighing(queries, keys)

    def _visible(self, piece: Piece, queries: Tensor, keys: Tensor, lengths: Tensor | None) -> Tensor:
        """bool [b or 1, 1, rows, columns]: what queries see of keys, both int64 numbers of tokens."""
        visible = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
        queries = queries.unsqueeze(1)
        if self.ring.visibility.causal:
            visible = visible & (keys <= queries)
            if self.ring.visibility.window is not None:
                visible = visible & (queries - keys < self.ring.visibility.window)
        if self.context.document_starts is not None:
            starts = self.context.document_starts[:, None, piece.queries.start : piece.queries.stop, None]
            visible = visible & (keys >= starts)
        if lengths is not None:
            visible = visible & (keys < lengths[:, None, None, None])
        return visible

    def _weighing(self, queries: Tensor, keys: Tensor) -> Weighing:
        ring = self.ring
        if not ring.dropout.active(self.context):
            return Weighing(ring.scale, unfused=ring.unfused)
        length = self.num_local * ring.group.size

        def drop(weights: Tensor) -> Tensor:
            return ring.dropout.drop_weights(weights, ring.first_head, queries, keys, length, self.context)

        return Weighing(ring.scale, drop)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, once: Pass) -> Tensor:
        # In memory as the output projection wants it: tokens before heads.
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        mixed = torch.zeros_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
        mixed = mixed.transpose(1, 2)
        log_sum = torch.full(query.shape[:3], -math.inf, dtype=wide, device=query.device)
        for key_rank, (keys, values) in _blocks_in_turn(key, value, once.ring.group):
            for piece, seen, weighing in once.work(key_rank, query.device):
                rows, columns = _slice(piece.queries), _slice(piece.keys)
                part = piece_forward(query[:, :, rows], keys[:, :, columns], values[:, :, columns], seen, weighing)
                _merge(mixed[:, :, rows], log_sum[:, :, rows], *part)
        mixed = mixed.to(query.dtype)
        # Finite for kernels, where a query has seen nothing.
        ctx.save_for_backward(query, key, value, mixed, log_sum.masked_fill_(log_sum == -math.inf, 0.0))
        ctx.once = once
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mixed, log_sum = ctx.saved_tensors
        once: Pass = ctx.once
        dquery = torch.zeros_like(query, dtype=log_sum.dtype)
        shape = (2, *key.shape)
        own, travelling = (torch.zeros(shape, dtype=log_sum.dtype, device=key.device) for _ in range(2))
        arriving: Work | None = None
        group = once.ring.group
        for key_rank, (keys, values) in _blocks_in_turn(key, value, group):
            found = own if key_rank == group.rank else torch.zeros_like(own)
            for piece, seen, weighing in once.work(key_rank, query.device):
                rows, columns = _slice(piece.queries), _slice(piece.keys)
                part = piece_backward(
                    gradient[:, :, rows],
                    query[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    mixed[:, :, rows],
                    log_sum[:, :, rows],
                    seen,
                    weighing,
                )
                dquery[:, :, rows] += part[0]
                found[0][:, :, columns] += part[1]
                found[1][:, :, columns] += part[2]
            if key_rank == group.rank:
                continue
            if arriving is not None:
                arriving.wait()
                found += travelling
            arriving = group.shift(found, travelling)
        if arriving is not None:
            arriving.wait()
            own += travelling
        dkey, dvalue = own.to(key.dtype)
        return dquery.to(query.dtype), dkey, dvalue, None


def _blocks_in_turn(key: Tensor, value: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """(rank, its keys and values [2, b, kv heads, s, d]), beginning here and going back through the ring.

    The next ones are under way while the caller works on those that it was given.
    """
    block = torch.stack([key, value])
    for step in range(group.size):
        following, work = block, None
        if step + 1 < group.size:
            following = torch.empty_like(block)
            work = group.shift(block, following)
        yield (group.rank - step) % group.size, block
        if work is not None:
            work.wait()
        block = following


def _merge(mixed: Tensor, log_sum: Tensor, part: Tensor, part_log_sum: Tensor) -> None:
    """Take a piece into the mixed values [b, heads, rows, d] and log-sums [b, heads, rows] so far, in place."""
    merged = torch.logaddexp(log_sum, part_log_sum)
    finite = merged.masked_fill(merged == -math.inf, 0.0)
    mixed.mul_((log_sum - finite).exp_().unsqueeze(-1))
    mixed.add_(part * (part_log_sum - finite).exp_().unsqueeze(-1))
    log_sum.copy_(merged)


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


@functools.lru_cache(maxsize=8)
def _numbers(order: TokenOrder, size: int, length: int, device: torch.device) -> Tensor:
    """int64 [size, length / size]: the tokens of every rank."""
    # Tensors born in inference mode could never take part in training.
    with torch.inference_mode(False):
        held = [torch.from_numpy(token_numbers(order, rank, size, length)) for rank in range(size)]
        return torch.stack(held).to(device)
