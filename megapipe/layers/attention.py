"""Causal self-attention: grouped-query, sliding window, rotary positions, query and key norms."""

import math
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from megapipe.config.model import ModelConfig
from megapipe.kernels.opaque import constant_when_compiled
from megapipe.kernels.reference.attention_probabilities import causal_mask
from megapipe.kernels.registry import Registry
from megapipe.layers.context import MicrobatchContext, token_numbers
from megapipe.layers.document_blocks import attend
from megapipe.layers.dropout import Dropout
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear, Shapes, within
from megapipe.layers.norms import Norm
from megapipe.layers.remade import Remade, run_again
from megapipe.layers.rotary import RotaryAngles
from megapipe.layout.token_order import Share
from megapipe.parallel.groups import Group
from megapipe.spec.attention_path import faster_path

AttentionPath = Literal["sdpa", "unfused"]


def choose_path(device: str, dtype: torch.dtype, num_tokens: int) -> AttentionPath:
    """The faster path, forward and backward, on this device type; `spec.attention_path` has the rule."""
    half = dtype in (torch.bfloat16, torch.float16)
    return faster_path(device, half, num_tokens, amx=half and device == "cpu" and has_amx())


@constant_when_compiled
def has_amx() -> bool:
    """Return whether this CPU has matrix instructions for bf16."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def visible_within_documents(document_starts: Tensor, window: int | None) -> Tensor:
    """Which keys (last axis) each query sees: bool [b, s, s] for document_starts int64 [b, s].

    Those of its own document up to itself, at most `window` in all.
    """
    keys = torch.arange(document_starts.shape[1], device=document_starts.device)
    queries = keys.unsqueeze(1)
    first = document_starts.unsqueeze(-1)
    if window is not None:
        first = torch.maximum(first, queries - (window - 1))
    return (keys <= queries) & (keys >= first)


class SharedSamples(Protocol):
    """How the ranks of a group that hold parts of the same samples attend to all of them."""

    @property
    def share(self) -> Share:
        """What this rank holds of each."""
        ...

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """As `Attention.mix`, of the tokens in hand."""
        ...


class Attention(nn.Module):
    """One block's attention on one tensor rank, which holds an equal share of the kv groups and their query heads.

    shapes: of `qkv.weight` (kv groups, query heads per group + 2, head_dim, hidden) and so on, as stored here.
    site: number of the dropout site of the attention weights. recompute: make the attention weights again in the
    backward rather than keep them; the fused paths never do. sharing: how samples are attended to whose tokens lie on
    several ranks; None where they are whole. causal: no token sees later ones.
    """

    causal = True

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry, site: int) -> None:
        super().__init__()
        self.sharing: SharedSamples | None = None
        self.qkv = ColumnParallelLinear(within(shapes, "qkv"), group)
        self.output = RowParallelLinear(within(shapes, "output"), group)
        self.kv_groups, rows, self.head_dim, _ = shapes["qkv.weight"]
        self.heads_per_group = rows - 2
        self.num_heads = self.kv_groups * self.heads_per_group
        self.first_head = group.rank * self.num_heads
        self.scale = self.head_dim**-0.5
        self.path = model.attention
        self.window = model.sliding_window
        self.kernels = kernels
        self.recompute = False
        self.rotary = RotaryAngles(model) if model.positions == "rotary" else None
        self.dropout = Dropout(model.attention_dropout, site, kernels)
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if model.qk_norm:
            # Each rank normalises its own heads with the one weight.
            self.query_norm = Norm("rms_norm", within(shapes, "query_norm"), model.norm_epsilon, kernels, group)
            self.key_norm = Norm("rms_norm", within(shapes, "key_norm"), model.norm_epsilon, kernels, group)

    def forward(self, x: Tensor, context: MicrobatchContext, again: Remade | None = None) -> Tensor:
        """Hidden states [b, s, h] to [b, s, h]. again: makes x again in the backward, so that x need not be kept."""
        projected = self.qkv(x, context.tape, again)
        batch, length, _ = projected.shape  # all tokens, of which x may be this rank's own
        heads = self.heads_per_group
        qkv = projected.view(batch, length, self.kv_groups, heads + 2, self.head_dim)
        query, key, value = qkv.split([heads, 1, 1], dim=3)
        query, key = self._prepare(query, self.query_norm, context), self._prepare(key, self.key_norm, context)
        mixed = (self if self.sharing is None else self.sharing).mix(query, key, value, context)
        return self.output(mixed.reshape(batch, length, -1), context.tape)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [b, s, kv groups, heads, d] or [b, s, all heads, d] of whole samples: query [b, s, kv groups,
        heads, d], key and value [b, s, kv groups, 1, d]."""
        if context.document_blocks is not None:
            return self._within_blocks(query, key, value, context.document_blocks)
        if self._picked_path(query, context) == "unfused":
            return self._unfused(query, key, value, context)
        return self._fused(query, key, value, context)

    def _prepare(self, x: Tensor, norm: Norm | None, context: MicrobatchContext) -> Tensor:
        """Normalise and rotate [b, s, kv groups, heads, d]."""
        if norm is not None:
            x = norm(x, context.tape)
        if self.rotary is None:
            return x
        share = None if self.sharing is None else self.sharing.share
        whole = x.shape[1] if share is None else x.shape[1] * share.size
        if context.document_starts is not None:
            cosine, sine = self.rotary.tables(whole, x)
            # The op knows one angle a token of one text: all samples pass as one long one.
            positions = token_numbers(context, x.shape[1], x.device) - context.document_starts
            cosine, sine = cosine[positions.flatten()], sine[positions.flatten()]
            rows = x.reshape(1, -1, x.shape[2] * x.shape[3], x.shape[4])
            return self.kernels.pick("rotary", x).apply(rows, cosine, sine).view(x.shape)
        cosine, sine = self.rotary.tables(whole, x, share)
        return self.kernels.pick("rotary", x).apply(x.flatten(2, 3), cosine, sine).view(x.shape)

    def _picked_path(self, x: Tensor, context: MicrobatchContext) -> AttentionPath:
        if self.path == "sdpa" or self.path == "unfused":
            return self.path
        if self.dropout.active(context):
            return "unfused"
        return choose_path(x.device.type, x.dtype, x.shape[1])

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [b, s, heads, d]."""
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        mask = self._fused_mask(query, context)
        grouped = query.shape[1] > key.shape[1]
        if grouped and query.device.type == "cuda" and (mask is not None or query.dtype == torch.float32):
            # There flash attention is out, and without it torch has no kernel for CUDA that shares keys among heads:
            # plain products would keep the whole square of attention weights.
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
        return mixed.transpose(1, 2)

    def _within_blocks(self, query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
        """Mixed values [b, s, heads, d] of documents that are kept apart by blocks."""
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        return attend(query, key, value, blocks, self.scale).transpose(1, 2)

    def _fused_mask(self, query: Tensor, context: MicrobatchContext) -> Tensor | None:
        """What the queries [b, heads, s, d] see, in a form that broadcasts to [b, heads, s, s]; None: all before."""
        if context.document_starts is not None:
            return visible_within_documents(context.document_starts, self.window).unsqueeze(1)
        length = query.shape[2]
        if self.window is None or self.window >= length:
            return None
        return causal_mask(length, self.window, query.dtype, query.device)

    def _weights(self, query: Tensor, key: Tensor, context: MicrobatchContext) -> Tensor:
        """Attention weights [n, rows, s] of query [n, rows, d] and key [n, s, d]; n = b x kv groups."""
        if context.document_starts is None:
            op = self.kernels.pick("attention_probabilities", query)
            weights: Tensor = op.apply(query, key, self.scale, self.window)
            return weights
        hidden = visible_within_documents(context.document_starts, self.window).logical_not_()
        batch, length, _ = hidden.shape
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(self.scale)
        by_head = scores.view(batch, -1, length, length)
        return by_head.masked_fill_(hidden.unsqueeze(1), -math.inf).softmax(dim=-1).view(scores.shape)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [b, s, kv groups, heads, d]. All query heads of a kv group share one product with its keys."""
        batch, length, groups, heads, width = query.shape
        rows = query.permute(0, 2, 3, 1, 4).reshape(batch * groups, heads * length, width)
        key, value = (part.permute(0, 2, 3, 1, 4).reshape(batch * groups, length, width) for part in (key, value))
        mix = partial(self._mixed, context=context)
        mixed = run_again(mix, rows, key, value) if self.recompute else mix(rows, key, value)
        return mixed.view(batch, groups, heads, length, width).permute(0, 3, 1, 2, 4)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [n, rows, d] of query [n, rows, d], key and value [n, s, d]; n = b x kv groups."""
        weights = self._weights(query, key, context)
        if self.dropout.active(context):
            length = key.shape[1]
            by_head = weights.view(-1, self.num_heads, length, length)
            weights = self.dropout.drop_attention(by_head, self.first_head, context).view(weights.shape)
        return torch.bmm(weights, value)
