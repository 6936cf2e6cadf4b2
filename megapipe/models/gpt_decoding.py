"""A GPT's layers for generation: a few new tokens at a time, attending to keys and values kept from before.

Wrappers around the modules that training uses, over the same parameters. Rows of a micro-batch may be at different
positions, so prompts of different lengths are processed together.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.layers.attention import Attention
from megapipe.layers.attention_pieces import Seen, piece_forward, with_sinks
from megapipe.layers.latent_attention import MultiLatentAttention
from megapipe.layers.norms import Norm
from megapipe.layers.rotary import rotated
from megapipe.models.gpt import Block, Embedding, Head


@dataclass(frozen=True)
class DecodingContext:
    """One micro-batch of b texts, of which s tokens each are new.

    rows: the texts' rows in the caches. tokens: int64 [b, s], for the embedding. positions: int64 [b, s], of these
    tokens in their texts. last: int64 [b], index within s of the token whose successor is asked for.
    visible: bool [b, s, length], which of the first `length` positions each new token attends to, by the sliding
    window of a block's attention. targets: int64 [b, s], the token to score after each new token; None for the logits
    after the token at `last`.
    """

    rows: slice
    tokens: Tensor
    positions: Tensor
    last: Tensor
    visible: Mapping[int | None, Tensor]
    targets: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: slice,
        tokens: Tensor,
        positions: Tensor,
        last: Tensor,
        *,
        length: int,
        windows: Collection[int | None],
        targets: Tensor | None = None,
    ) -> "DecodingContext":
        """With what causal attention sees, at most so many positions. length: above every position."""
        distance = positions.unsqueeze(-1) - torch.arange(length, device=positions.device)
        visible = {each: (distance >= 0) & (distance < (length if each is None else each)) for each in windows}
        return cls(rows, tokens, positions, last, visible, targets)


class DecodingLayer(Protocol):
    """A layer as the engine runs it."""

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor, ...]: ...


class DecodingEmbedding:
    """Tokens to hidden states."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """() to (hidden [b, s, h],)."""
        hidden = self._embedding.word(context.tokens, None)
        if self._embedding.position is not None:
            # Padding of a prompt's chunk may be after the last position; no query attends to it.
            known = context.positions.clamp(max=self._embedding.position.weight.shape[0] - 1)
            hidden = hidden + self._embedding.position.look_up(known, None, None)
        if self._embedding.norm is not None:
            hidden = self._embedding.norm(hidden, None)
        return (hidden,)


class DecodingBlock:
    """A transformer block with the cache of `rows` texts of up to `capacity` tokens."""

    def __init__(self, block: Block, rows: int, capacity: int) -> None:
        self._block = block
        attention = block.attention
        self._attend: CachedAttention
        if isinstance(attention, MultiLatentAttention):
            self._attend = LatentCache(attention, rows, capacity)
        else:
            self._attend = KeyValueCache(attention, rows, capacity)

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """(hidden [b, s, h],) to (hidden [b, s, h],)."""
        (hidden,) = inputs
        return (self._block.around(lambda x, _: self._attend(x, context), hidden, None),)


class CachedAttention(Protocol):
    """The attention of a block to all tokens so far."""

    def __call__(self, x: Tensor, context: DecodingContext) -> Tensor:
        """Hidden states [b, s, h] of new tokens to [b, s, h]."""
        ...


class KeyValueCache:
    """Attention with the keys and values of every head."""

    def __init__(self, attention: Attention, rows: int, capacity: int) -> None:
        self._attention = attention
        shape = (rows, attention.kv_groups, capacity, attention.head_dim)
        # Zeros, since a hidden position still takes part in the sum, with weight 0.
        self._keys = attention.qkv.weight.new_zeros(shape)
        self._values = attention.qkv.weight.new_zeros(shape)

    def __call__(self, x: Tensor, context: DecodingContext) -> Tensor:
        attention = self._attention
        batch, new, _ = x.shape
        groups, heads, width = attention.kv_groups, attention.heads_per_group, attention.head_dim
        qkv = attention.qkv(x, None).view(batch, new, groups, heads + 2, width)
        query, key, value = qkv.split([heads, 1, 1], dim=3)
        capacity = self._keys.shape[2]
        query = _placed(attention, query, attention.query_norm, context.positions, capacity)
        key = _placed(attention, key, attention.key_norm, context.positions, capacity)
        keys, values = self._keys[context.rows], self._values[context.rows]
        place = (torch.arange(batch, device=x.device).unsqueeze(1), context.positions)
        keys.transpose(1, 2)[place] = key.squeeze(3)
        values.transpose(1, 2)[place] = value.squeeze(3)
        return attention.project(_mixed(attention, query, keys, values, context), None)


class LatentCache:
    """Multi-latent attention with each token's latent and shared rotated key, which the heads of all tensor ranks have
    in common: (c + r) numbers for a token instead of keys and values of all heads.

    The matrix that makes keys of latents is applied to queries, and the one that makes values to mixed latents, so
    that neither keys nor values exist (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): all heads attend to one key.
    """

    def __init__(self, attention: MultiLatentAttention, rows: int, capacity: int) -> None:
        self._attention = attention
        channels = attention.kv_down.weight.shape[0]
        self._latents = attention.kv_down.weight.new_zeros((rows, 1, capacity, channels))

    def __call__(self, x: Tensor, context: DecodingContext) -> Tensor:
        attention, capacity = self._attention, self._latents.shape[2]
        up = attention.kv_up.weight.unflatten(0, (attention.kv_groups, -1))
        of_keys, of_values = up.split([up.shape[1] - attention.value_dim, attention.value_dim], dim=1)
        query = _placed(attention, attention.queries(x, None), None, context.positions, capacity).squeeze(3)
        latent, shared = attention.latents(x, None)
        shared = _placed(attention, shared[:, :, None, None], None, context.positions, capacity)[:, :, 0, 0]
        rotated, own = query.split([shared.shape[-1], of_keys.shape[1]], dim=-1)
        query = torch.cat([torch.einsum("bshd,hdc->bshc", own, of_keys), rotated], dim=-1)
        latents = self._latents[context.rows]
        place = (torch.arange(len(x), device=x.device).unsqueeze(1), context.positions)
        latents[:, 0][place] = torch.cat([latent, shared], dim=-1)
        # What the shared keys add to the mixed channels is cut off: fused kernels need values as wide as keys.
        mixed = _mixed(attention, query.unsqueeze(2), latents, latents, context).flatten(2, -2)
        return attention.project(torch.einsum("bshc,hdc->bshd", mixed[..., : latent.shape[-1]], of_values), None)


def _mixed(attention: Attention, query: Tensor, keys: Tensor, values: Tensor, context: DecodingContext) -> Tensor:
    """Return mixed values [b, s, kv groups, heads, d] or [b, s, heads, d] of query [b, s, kv groups, heads, d] and of
    cached keys and values [b, kv groups, capacity, d]."""
    batch, new, groups, heads, width = query.shape
    visible = context.visible[attention.window]
    length = visible.shape[-1]
    if attention.softcap is not None or attention.in_pieces is not None:
        query = query.flatten(2, 3).transpose(1, 2)
        seen = Seen(visible=visible.unsqueeze(1))
        how = attention.weighing(context.positions.unsqueeze(1), torch.arange(length, device=query.device))
        mixed, log_sum = piece_forward(query, keys[:, :, :length], values[:, :, :length], seen, how)
        if (sinks := attention.own_sinks(None)) is not None:
            mixed, _ = with_sinks(mixed, log_sum, sinks)
        return mixed.transpose(1, 2)
    # The query heads of a kv group are adjacent rows, so that they share its keys without copies.
    mixed = functional.scaled_dot_product_attention(
        query.permute(0, 2, 3, 1, 4).reshape(batch, groups, heads * new, width),
        keys[:, :, :length],
        values[:, :, :length],
        attn_mask=visible.unsqueeze(1).repeat(1, 1, heads, 1),
        scale=attention.scale,
    )
    return mixed.view(batch, groups, heads, new, width).permute(0, 3, 1, 2, 4)


class DecodingHead:
    """Hidden states to the logits of one token a text, whose others are never computed, or to scores of targets."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """(hidden [b, s, h],) to (logits over the true vocabulary [b, v],).

        With targets: to (float32 [b, s, 2],), the log probability of each target, and 1 where no token is more likely.
        """
        (hidden,) = inputs
        if context.targets is not None:
            logits = self._head.output.logits(self._head.normalised(hidden, None), None).float()
            targets = context.targets.unsqueeze(-1)
            scores = logits.log_softmax(dim=-1).gather(-1, targets)
            return (torch.cat([scores, (logits.argmax(dim=-1, keepdim=True) == targets).float()], dim=-1),)
        wanted = hidden[torch.arange(len(hidden), device=hidden.device), context.last].unsqueeze(1)
        return (self._head.output.logits(self._head.normalised(wanted, None), None).squeeze(1),)


def decoding_layer(layer: object, *, rows: int, capacity: int) -> DecodingLayer:
    """The decoding form of a layer of `build_layer`, over its parameters.

    rows, capacity: texts, and tokens of each, that a block's cache has room for.
    """
    if isinstance(layer, Embedding):
        return DecodingEmbedding(layer)
    if isinstance(layer, Block):
        return DecodingBlock(layer, rows, capacity)
    if isinstance(layer, Head):
        return DecodingHead(layer)
    raise TypeError(f"{type(layer).__name__} is not a layer of a GPT; it must be an Embedding, a Block or a Head")


def _placed(attention: Attention, x: Tensor, norm: Norm | None, positions: Tensor, capacity: int) -> Tensor:
    """Normalise and rotate [b, s, kv groups, heads, d], each token by its own position."""
    if norm is not None:
        x = norm(x, None)
    if attention.rotary is None:
        return x
    cosine, sine = (table[positions.flatten()] for table in attention.rotary.tables(capacity, x))
    return rotated(x, cosine, sine, attention.kernels, own_positions=True)
