"""Self-attention: causal or bidirectional, grouped-query or multi-latent, sliding window, rotary positions, query and
key norms.

Attention within documents on a GPU is torch's flex_attention over the blocks of keys that a block of queries sees.
Blocks without visible keys cost nothing (Dong et al., "Flex Attention", arXiv 2412.05496, section 3.2), whereas the
cost of a mask is quadratic in the sample's length. The visible blocks are computed from the starts of documents,
without reading tokens and in less than quadratic memory.

Multi-latent attention computes keys and values from a small latent of each token (DeepSeek-V2, arXiv 2405.04434,
section 2.1). A token has one latent for the keys and values of all heads, one rotated key that all heads share and, in
some models, a latent for queries. Generation caches only latents and rotated keys. Every tensor rank computes the
latents of all tokens, and its own heads; under sequence parallelism it computes latents of its own tokens, which are
then gathered, because they are narrower than hidden states.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megapipe.config.model import ModelConfig
from megapipe.kernels.reference.attention import causal_mask
from megapipe.kernels.registry import Registry, constant_when_compiled
from megapipe.layers.attention_pieces import Weighing
from megapipe.layers.context import BertContext, MicrobatchContext, token_numbers
from megapipe.layers.dropout import Dropout
from megapipe.layers.embedding import RotaryAngles, rotated
from megapipe.layers.linear import (
    ColumnParallelLinear,
    OnShards,
    OwnTokensLinear,
    RowParallelLinear,
    Shapes,
    empty_parameter,
    within,
)
from megapipe.layers.norms import Norm, ProjectionNorm
from megapipe.layers.split import InsteadOf, Rerun, SplitModule, SplitTape, Tensors, WeightGradients, rerun_product
from megapipe.parallel.groups import Group
from megapipe.spec.attention import faster_path
from megapipe.spec.ops import AttentionPath

if TYPE_CHECKING:
    from megapipe.layers.context_parallel import HeadExchange, Ring

BLOCK = 128
"""Number of queries, and of keys, in a block."""


class BlockLists(NamedTuple):
    """The blocks of keys that each block of queries sees, as int32 tensors: their number [b, 1, blocks], and their
    indices [b, 1, blocks, blocks], visible ones first. partial: blocks in which some queries see some keys. full:
    blocks in which all queries see all keys.
    """

    num_partial: np.ndarray
    partial: np.ndarray
    num_full: np.ndarray
    full: np.ndarray


def block_lists(document_starts: np.ndarray, window: int | None, block: int = BLOCK) -> BlockLists:
    """Return the lists for document_starts int64 [b, s]; each token sees the tokens of its document up to itself, at
    most the last `window`."""
    length = document_starts.shape[1]
    first = document_starts
    if window is not None:
        first = np.maximum(first, np.arange(length) - (window - 1))
    begins = np.arange(0, length, block)
    last = np.minimum(begins + block, length) - 1
    # The first visible key never decreases from one query to the next.
    queries, keys = np.arange(len(begins))[:, None], np.arange(len(begins))
    lowest, whole_from = first[:, begins, None] // block, -(-first[:, last, None] // block)
    full = (keys >= whole_from) & (keys < queries) & (last == begins + block - 1)[:, None]
    partial = (keys >= lowest) & (keys <= queries) & ~full
    return BlockLists(*_listed(partial), *_listed(full))


def _listed(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for bool [b, n, n], the number of true values in each row, and their ascending indices, followed by the
    others."""
    order = np.argsort(~wanted, axis=-1, kind="stable").astype(np.int32)
    return wanted.sum(axis=-1, dtype=np.int32)[:, None], order[:, None]


def document_blocks(lists: Sequence[Tensor], document_starts: Tensor, window: int | None) -> BlockMask:
    """Return flex_attention's mask. lists: the tensors of a BlockLists in order. document_starts: [b, s]. All are on
    the same device."""

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (key >= document_starts[sample, query])
        return seen if window is None else seen & (query - key < window)

    num_partial, partial, num_full, full = lists
    lengths = document_starts.shape[1], document_starts.shape[1]
    return BlockMask.from_kv_blocks(
        num_partial, partial, num_full, full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float) -> Tensor:
    """Return attention outputs [b, heads, s, d] for queries [b, heads, s, d], and keys and values [b, kv heads, s,
    d]."""
    compiles = query.device.type == "cuda" and not torch.compiler.is_compiling()
    function = _compiled() if compiles else flex_attention
    grouped = query.shape[1] != key.shape[1]
    mixed: Tensor = function(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return mixed


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Return flex_attention compiled, because the uncompiled one computes all scores, masked or not."""
    return torch.compile(flex_attention)


def choose_path(device: str, dtype: torch.dtype, num_tokens: int) -> AttentionPath:
    """Return the faster path, for forward and backward together, on this type of device, by the rule of
    `spec.attention`."""
    half = dtype in (torch.bfloat16, torch.float16)
    return faster_path(device, half, num_tokens, amx=half and device == "cpu" and has_amx())


@constant_when_compiled
def has_amx() -> bool:
    """Return whether this CPU has matrix instructions for bf16."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def visible_within_documents(document_starts: Tensor, window: int | None) -> Tensor:
    """Return which keys (last axis) each query sees, bool [b, s, s], for document_starts int64 [b, s].

    These are the keys of its own document up to itself, at most the last `window`.
    """
    keys = torch.arange(document_starts.shape[1], device=document_starts.device)
    queries = keys.unsqueeze(1)
    first = document_starts.unsqueeze(-1)
    if window is not None:
        first = torch.maximum(first, queries - (window - 1))
    return (keys <= queries) & (keys >= first)


class Sinks(SplitModule):
    """Attention sinks: one more score per head in the softmax. shapes: of `weight` (kv groups, query heads per
    group)."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])

    def forward(self, tape: SplitTape | None) -> Tensor:
        """Return the scores [kv groups, query heads per group]."""
        if tape is None:
            return self.weight
        probe = tape.record(self, self.weight.shape, self.weight).probe
        scores: Tensor = InsteadOf.apply(probe, self.weight.detach())
        return scores

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        yield self.weight, gradient


class Attention(nn.Module):
    """One block's attention on one tensor rank, which holds an equal share of the kv groups and their query heads.

    shapes: of `qkv.weight` (kv groups, query heads per group + 2, head_dim, hidden) and so on, as stored here.
    site: number of the dropout site of the attention weights. recompute: recompute the attention weights in the
    backward instead of saving them; the fused paths never save them. sharing: attention to samples whose tokens are on
    several ranks; None for whole samples. in_pieces: attention to whole samples if no other path supports them.
    own_heads: the heads for which this rank computes attention, among those that it projects. causal: no token sees
    later ones.
    """

    causal = True

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry, site: int) -> None:
        super().__init__()
        self.sharing: Ring | HeadExchange | None = None
        self.in_pieces: Ring | None = None
        self.own_heads = slice(None)
        self._add_projections(model, shapes, group, kernels)
        self.output = RowParallelLinear(within(shapes, "output"), group)
        self.num_heads = self.kv_groups * self.heads_per_group
        self.first_head = group.rank * self.num_heads
        self.scale = model.score_scale
        self.softcap = model.attention_softcap
        self.all_heads = model.num_heads
        self.falls_with_distance = model.positions == "alibi"
        self.path = model.attention
        self.window, self.chunk = model.sliding_window, model.attention_chunk_size
        self.reach = model.attention_reach
        self.kernels = kernels
        self.recompute = False
        self.rotary = RotaryAngles(model) if model.positions == "rotary" else None
        self.sinks = Sinks(within(shapes, "sinks")) if model.attention_sinks else None
        self.dropout = Dropout(model.attention_dropout, site, kernels)

    def _add_projections(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        """Add the projections from hidden states to queries, keys and values."""
        self.qkv = ColumnParallelLinear(within(shapes, "qkv"), group)
        self.kv_groups, rows, self.head_dim, _ = shapes["qkv.weight"]
        self.heads_per_group = rows - 2
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        query, key, epsilon = within(shapes, "query_norm"), within(shapes, "key_norm"), model.norm_epsilon
        if model.qk_norm and model.qk_norm_over == "projection":
            self.query_norm = ProjectionNorm(query, epsilon, kernels, group)
            self.key_norm = ProjectionNorm(key, epsilon, kernels, group)
        elif model.qk_norm:
            # Each rank normalises its own heads with the same weight.
            op = model.head_norm_kind.op
            self.query_norm = Norm(op, query, epsilon, kernels, group)
            self.key_norm = Norm(op, key, epsilon, kernels, group)

    def forward(self, x: Tensor, context: MicrobatchContext, rerun: Rerun | None = None) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, h]. rerun: recomputes x in the backward, so that x is not saved."""
        query, key, value = self._projected(x, context, rerun)
        if context.slice is not None:
            mixed = context.slice.mix(self, query, key, value, context)
        else:
            mixed = (self if self.sharing is None else self.sharing).mix(query, key, value, context)
        return self.project(mixed, context.tape)

    def _projected(self, x: Tensor, context: MicrobatchContext, rerun: Rerun | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [b, s, kv groups, heads, d], key [b, s, kv groups, 1, d] and value [b, s, kv groups, 1, d']."""
        projected = self.qkv(x, context.tape, rerun)
        batch, length, _ = projected.shape  # number of all tokens; x may be only this rank's
        heads = self.heads_per_group
        qkv = projected.view(batch, length, self.kv_groups, heads + 2, self.head_dim)
        query, key, value = qkv.split([heads, 1, 1], dim=3)
        return self._prepare(query, self.query_norm, context), self._prepare(key, self.key_norm, context), value

    def project(self, mixed: Tensor, tape: SplitTape | None) -> Tensor:
        """Return the hidden states [b, s, h] for attention outputs [b, s, kv groups, heads, d'] or [b, s, heads, d'].

        Decoding calls it too, so that only one place has the code after the attention itself.
        """
        return self.output(mixed.flatten(2), tape)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention outputs [b, s, kv groups, heads, d'] or [b, s, all heads, d'] for whole samples: query [b,
        s, kv groups, heads, d], key [b, s, kv groups, 1, d], value [b, s, kv groups, 1, d']."""
        if self.chunk is not None and self.chunk < query.shape[1]:
            return self._in_chunks(query, key, value, context, self.chunk)
        return self._mix(query, key, value, context)

    def _in_chunks(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext, chunk: int) -> Tensor:
        """Return attention outputs [b, s, heads, d'] for samples in which tokens only see their own chunk: each chunk
        is treated as a sample."""
        batch, length = query.shape[:2]
        if length % chunk:
            raise ValueError(
                f"samples of {length} tokens do not divide into chunks of model.attention_chunk_size {chunk}; pad them"
            )
        if context.document_starts is not None:
            begins = torch.arange(0, length, chunk, device=query.device).unsqueeze(1)
            starts = context.document_starts.unflatten(1, (-1, chunk)) - begins
            context = replace(context, document_starts=starts.clamp(min=0).flatten(0, 1))
        query, key, value = (part.unflatten(1, (-1, chunk)).flatten(0, 1) for part in (query, key, value))
        mixed = self._mix(query, key, value, context)
        return mixed.reshape(batch, length, -1, mixed.shape[-1])

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        if self.in_pieces is not None:
            return self.in_pieces.mix(query, key, value, context)
        if context.document_blocks is None and self._picked_path(query, context) == "unfused":
            return self._unfused(query, key, value, context)
        return self._fused(query, key, value, context)

    def weighing(self, queries: Tensor, keys: Tensor) -> Weighing:
        """Return how pieces of attention compute weights from scores, without dropout. queries [..., rows], keys [...,
        columns]: their integer positions in samples."""
        how = Weighing(self.scale, unfused=self.path == "unfused", softcap=self.softcap)
        if not self.falls_with_distance:
            return how
        slopes = alibi_slopes(self.all_heads, keys.device)[self.first_head : self.first_head + self.num_heads]
        return replace(how, slopes=slopes, distances=(queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs())

    def own_sinks(self, tape: SplitTape | None) -> Tensor | None:
        """Return the sinks of the heads for which this rank computes attention, [heads]; None if the model has
        none."""
        return None if self.sinks is None else self.sinks(tape).flatten()[self.own_heads]

    def _prepare(self, x: Tensor, norm: Norm | None, context: MicrobatchContext) -> Tensor:
        """Normalise and rotate [b, s, kv groups, heads, d]."""
        if norm is not None:
            x = norm(x, context.tape)
        if self.rotary is None:
            return x
        share = None if self.sharing is None else self.sharing.share
        whole = x.shape[1] if share is None else x.shape[1] * share.size
        if context.slice is not None:
            whole = context.slice.whole
        if context.document_starts is not None:
            cosine, sine = self.rotary.tables(whole, x)
            positions = token_numbers(context, x.shape[1], x.device) - context.document_starts
            cosine, sine = cosine[positions.flatten()], sine[positions.flatten()]
            return rotated(x, cosine, sine, self.kernels, own_positions=True)
        tables = self.rotary.tables(whole, x, share)
        if context.slice is not None:
            places = context.slice.places
            tables = (tables[0][places.start : places.stop], tables[1][places.start : places.stop])
        return rotated(x, *tables, self.kernels)

    def _picked_path(self, x: Tensor, context: MicrobatchContext) -> AttentionPath:
        if self.path == "sdpa" or self.path == "unfused":
            return self.path
        if self.dropout.active(context) or self.softcap is not None:
            return "unfused"
        return choose_path(x.device.type, x.dtype, x.shape[1])

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention outputs [b, s, heads, d']."""
        channels, value = value.shape[-1], widened(value, query)
        query, key, value = (x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))
        if context.document_blocks is not None:
            mixed = attend(query, key, value, context.document_blocks[self.window], self.scale)
            return narrowed(mixed.transpose(1, 2), channels)
        mask = self._fused_mask(query, context)
        grouped = query.shape[1] > key.shape[1]
        if grouped and query.device.type == "cuda" and (mask is not None or query.dtype == torch.float32):
            # Flash attention does not support this case, and torch's other CUDA kernels do not support fewer kv heads
            # than heads: plain products would save all attention weights.
            key, value = (part.repeat_interleave(self.heads_per_group, dim=1) for part in (key, value))
            grouped = False
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return narrowed(mixed.transpose(1, 2), channels)

    def _fused_mask(self, query: Tensor, context: MicrobatchContext) -> Tensor | None:
        """Return the visible keys of queries [b, heads, s, d], broadcastable to [b, heads, s, s]; None for all earlier
        keys."""
        if context.document_starts is not None:
            return visible_within_documents(context.document_starts, self.window).unsqueeze(1)
        length = query.shape[2]
        if self.window is None or self.window >= length:
            return None
        return causal_mask(length, self.window, query.dtype, query.device)

    def _weights(self, query: Tensor, key: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention weights [n, rows, s] for query [n, rows, d] and key [n, s, d]; n = b x kv groups."""
        starts, length = context.document_starts, key.shape[1]
        if starts is None and self.softcap is None:
            op = self.kernels.pick("attention_probabilities", query)
            weights: Tensor = op.apply(query, key, self.scale, self.window)
            return weights
        products, scale = self._products(query, key)
        if starts is None:
            mask = causal_mask(length, self.window, query.dtype, query.device)
            scores = torch.add(mask, products.view(len(query), -1, length, length), alpha=scale)
        else:
            hidden = visible_within_documents(starts, self.window).logical_not_().unsqueeze(1)
            # The gradient of a capped score needs these products.
            scores = products.mul_(scale) if self.softcap is None else products * scale
            scores = scores.view(len(hidden), -1, length, length).masked_fill_(hidden, -math.inf)
        return scores.softmax(dim=-1).view(products.shape)

    def _products(self, query: Tensor, key: Tensor) -> tuple[Tensor, float]:
        """Return the products [n, rows, s] of query and key, and the factor that turns them into scores; with a
        softcap, tanh is applied in between."""
        if self.softcap is None:
            return torch.bmm(query, key.transpose(1, 2)), self.scale
        # Scale within the product, because unscaled scores might exceed the range of fp16.
        empty, scale = query.new_empty(1, 1, 1), self.scale / self.softcap
        products = torch.baddbmm(empty, query, key.transpose(1, 2), beta=0.0, alpha=scale)
        return products.tanh_(), self.softcap

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention outputs [b, s, kv groups, heads, d']. All query heads of a kv group are in one product with
        its keys."""
        batch, length, groups, heads, width = query.shape
        rows = query.permute(0, 2, 3, 1, 4).reshape(batch * groups, heads * length, width)
        key, value = (part.permute(0, 2, 3, 1, 4).reshape(batch * groups, length, -1) for part in (key, value))
        make = partial(self._dropped_weights, context=context)
        mixed = rerun_product(make, value, rows, key) if self.recompute else torch.bmm(make(rows, key), value)
        return mixed.view(batch, groups, heads, length, -1).permute(0, 3, 1, 2, 4)

    def _dropped_weights(self, query: Tensor, key: Tensor, context: MicrobatchContext) -> Tensor:
        """Return attention weights [n, rows, s] after dropout, for query [n, rows, d] and key [n, s, d]; n = b x kv
        groups."""
        weights = self._weights(query, key, context)
        if not self.dropout.active(context):
            return weights
        by_head = weights.view(-1, self.num_heads, key.shape[1], key.shape[1])
        return self.dropout.drop_attention(by_head, self.first_head, context).view_as(weights)


def widened(value: Tensor, query: Tensor) -> Tensor:
    """Return values [..., d'] padded with zeros to the channels of queries [..., d], because fused kernels need equal
    widths."""
    missing = query.shape[-1] - value.shape[-1]
    return functional.pad(value, (0, missing)) if missing else value


def narrowed(mixed: Tensor, channels: int) -> Tensor:
    """Return the first channels of attention outputs, without the padding of `widened`."""
    return mixed if mixed.shape[-1] == channels else mixed[..., :channels].contiguous()


class BidirectionalAttention(Attention):
    """One block's bidirectional attention within the lengths of samples in a BertContext."""

    causal = False

    def _fused_mask(self, query: Tensor, context: MicrobatchContext) -> Tensor:
        return visible_keys(context, query.shape[2], self.window).unsqueeze(1)

    def _weights(self, query: Tensor, key: Tensor, context: MicrobatchContext) -> Tensor:
        visible = visible_keys(context, key.shape[1], self.window)
        hidden = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -math.inf)
        products, scale = self._products(query, key)
        scores = products.view(len(hidden), -1, *hidden.shape[1:])
        weights = torch.softmax(torch.add(hidden.unsqueeze(1), scores, alpha=scale), dim=-1)
        return weights.view(query.shape[0], query.shape[1], key.shape[1])


EPSILON = 1e-6
"""Epsilon of the norms of latents, independent of the model's norm_epsilon (transformers' DeepseekV2Attention)."""


class MultiLatentAttention(Attention, OnShards):
    """One block's multi-latent attention on one tensor rank, which has an equal part of the heads.

    shapes: of `kv_down.weight` (latent + rotated channels, hidden), `kv_latent_norm.weight` (latent),
    `kv_up.weight` (heads x (d - rotated channels + d'), latent) with the key before the value, and of `query.weight`
    (heads x d, hidden), or `query_down`, `query_latent_norm` and `query_up` likewise. Among the d channels of a head,
    the rotated ones come first, in queries and in keys; values have d' channels.
    """

    def _add_projections(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        self.group = group
        self.kv_groups, self.heads_per_group = model.num_heads // group.size, 1
        self.head_dim, self.value_dim = model.head_dim, model.value_dim
        self.latent_size = shapes["kv_up.weight"][-1]
        self.query_down: OwnTokensLinear | None = None
        if model.query_latent_size is None:
            self.query = ColumnParallelLinear(within(shapes, "query"), group)
        else:
            self.query_down = OwnTokensLinear(within(shapes, "query_down"), group)
            self.query_latent_norm = _latent_norm(model, shapes, "query_latent_norm", kernels)
            self.query_up = ColumnParallelLinear(within(shapes, "query_up"), group)
        self.kv_down = OwnTokensLinear(within(shapes, "kv_down"), group)
        self.kv_latent_norm = _latent_norm(model, shapes, "kv_latent_norm", kernels)
        self.kv_up = ColumnParallelLinear(within(shapes, "kv_up"), group)

    def _projected(self, x: Tensor, context: MicrobatchContext, rerun: Rerun | None) -> tuple[Tensor, Tensor, Tensor]:
        tape = context.tape
        query = self._prepare(self.queries(x, tape, rerun), None, context)
        latent, shared = self.latents(x, tape, rerun)
        own, value = (
            self.kv_up(latent, tape)
            .unflatten(-1, (self.kv_groups, 1, -1))
            .split([self.head_dim - shared.shape[-1], self.value_dim], dim=-1)
        )
        whole = self.on_all_tokens(shared, self.group)
        rotated = self._prepare(whole[:, :, None, None], None, context)
        return query, torch.cat([rotated.expand(-1, -1, self.kv_groups, -1, -1), own], dim=-1), value

    def queries(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Return queries [b, s, heads, 1, d], before rotation, for hidden states [b, s, h]."""
        if self.query_down is None:
            query = self.query(x, tape, rerun)
        else:
            query = self.query_up(self.query_latent_norm(self.query_down(x, tape, rerun), tape), tape)
        return query.unflatten(-1, (self.kv_groups, 1, self.head_dim))

    def latents(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> tuple[Tensor, Tensor]:
        """Return normalised latents [b, s, c] of keys and values, and shared keys [b, s, r] before rotation."""
        down = self.kv_down(x, tape, rerun)
        latent, shared = down.split([self.latent_size, down.shape[-1] - self.latent_size], dim=-1)
        return self.kv_latent_norm(latent, tape), shared


def _latent_norm(model: ModelConfig, shapes: Shapes, name: str, kernels: Registry) -> Norm:
    return Norm(model.head_norm_kind.op, within(shapes, name), EPSILON, kernels)


@lru_cache(maxsize=8)
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes, float64 [heads]: the decrease of a head's scores per token of distance.

    Slopes are powers of 2 (Press et al. 2022, arXiv 2108.12409, section 3). If the number of heads is not a power of
    2, they are the slopes for the next lower power of 2, followed by every second slope for the next higher power (as
    in the authors' published code, and in BLOOM's).
    """
    lower = 2 ** (num_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / lower for i in range(lower)]
    exponents += [8 * (2 * i + 1) / (2 * lower) for i in range(num_heads - lower)]
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        return torch.tensor([2.0**-each for each in exponents], dtype=torch.float64).to(device)


def visible_keys(context: MicrobatchContext, num_tokens: int, window: int | None) -> Tensor:
    """Return which keys (last axis) each query sees: bool [b, 1, s], the same for all queries, or [b, s, s] with a
    window.

    A query sees tokens that are not padding, at distances below `window`, and itself, because a padding query may see
    no other key, and a softmax over no keys is NaN. Raises ValueError without lengths.
    """
    if not isinstance(context, BertContext) or context.lengths is None:
        raise ValueError("attention over padded samples needs a BertContext with their lengths")
    places = torch.arange(num_tokens, device=context.lengths.device)
    visible = (places < context.lengths.unsqueeze(1)).unsqueeze(1)
    if window is None or window >= num_tokens:
        return visible
    distances = (places.unsqueeze(1) - places).abs()
    return (visible & (distances < window)) | (distances == 0)
