"""A GPT's layers for generation: a few new tokens at a time, which attend to cached keys and values.

The layers wrap the modules that training uses, with the same parameters. Rows of a micro-batch may be at different
positions, so prompts of different lengths are processed together.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.config.model import Reach
from megapipe.layers.attention import Attention, MultiLatentAttention
from megapipe.layers.attention_pieces import Seen, piece_forward, with_sinks
from megapipe.layers.embedding import rotated
from megapipe.layers.norms import Norm
from megapipe.layers.split import Tensors
from megapipe.models.gpt import Block, Embedding, Head


def cache_slots(reaches: Collection[Reach], capacity: int, width: int) -> dict[Reach, int]:
    """Return how many tokens of a text a block's cache has room for, by the reach of its attention.

    With a window, this is the window of the first of up to `width` new tokens, plus the other new tokens, so that new
    tokens only replace tokens that none of them attends to. A chunk needs no more room than a window of its size.
    capacity: maximum tokens of a text.
    """
    return {each: capacity if each.tokens is None else min(capacity, each.tokens + width - 1) for each in reaches}


@dataclass(frozen=True)
class CacheContent:
    """The tokens in the caches of a reach once the new ones are stored: the latest tokens, each in the slot whose
    number is its position modulo the number of slots.

    slots: int64 [b, s], slots of the new tokens. positions: int64 [b, slots], position of the token in each slot;
    below 0 for an empty slot. visible: bool [b, s, slots], which slots each new token attends to.
    """

    slots: Tensor
    positions: Tensor
    visible: Tensor


@dataclass(frozen=True)
class DecodingContext:
    """One micro-batch of b texts with s new tokens each.

    rows: the texts' rows in the caches. tokens: int64 [b, s], the new tokens. positions: int64 [b, s], consecutive
    positions of these tokens in their texts. last: int64 [b], index of the new token after which the next one is
    predicted. real: bool [b, s], false for padding, which is not cached. held: the tokens in the caches, by the reach
    of a block's attention. targets: int64 [b, s], the token to score after each new token; None for the logits after
    the token at `last`.
    """

    rows: slice
    tokens: Tensor
    positions: Tensor
    last: Tensor
    real: Tensor
    held: Mapping[Reach, CacheContent]
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
        slots: Mapping[Reach, int],
        targets: Tensor | None = None,
    ) -> "DecodingContext":
        """Return a context in which `real` and `held` are computed for causal attention. length: above every position.
        slots: result of `cache_slots`.

        last: tokens after it are padding; below 0 for a text that ended before these tokens.
        """
        new = torch.arange(positions.shape[1], device=positions.device)
        newest = positions[:, :1] + last.clamp(max=len(new) - 1).unsqueeze(1)
        real = new <= last.unsqueeze(1)
        held = {}
        for reach, number in slots.items():
            places = newest - (newest - torch.arange(min(length, number), device=positions.device)) % number
            distance = positions.unsqueeze(-1) - places.unsqueeze(1)
            most = length if reach.tokens is None else reach.tokens
            within = (positions % most + 1).unsqueeze(-1) if reach.in_chunks else most
            visible = (distance >= 0) & (distance < within)
            # Padding sees everything: a softmax of nothing would be NaN.
            visible = (visible & (places >= 0).unsqueeze(1)) | ~real.unsqueeze(-1)
            held[reach] = CacheContent(positions % number, places, visible)
        return cls(rows, tokens, positions, last.clamp(0, len(new) - 1), real, held, targets)

    def store(self, reach: Reach, cache: Tensor, new: Tensor) -> None:
        """Write new tokens [b, s, groups, d] into a cache [b, groups, slots, d]."""
        place = torch.arange(len(new), device=new.device).unsqueeze(1), self.held[reach].slots
        stored = cache.transpose(1, 2)
        stored[place] = torch.where(self.real[..., None, None], new, stored[place])


class DecodingLayer(Protocol):
    """A layer as the engine runs it."""

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> Tensors: ...


class DecodingEmbedding:
    """Maps tokens to hidden states."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """Return (hidden [b, s, h],) for the context's tokens; there are no inputs."""
        hidden = self._embedding.word(context.tokens, None)
        if self._embedding.position is not None:
            # Padding of a prompt's chunk may be after the last position; no query attends to it.
            known = context.positions.clamp(max=self._embedding.position.weight.shape[0] - 1)
            hidden = hidden + self._embedding.position.look_up(known, None, None)
        if self._embedding.norm is not None:
            hidden = self._embedding.norm(hidden, None)
        return (hidden,)


class DecodingBlock:
    """A transformer block with a cache for `rows` texts of up to `capacity` tokens. slots: result of `cache_slots`."""

    def __init__(self, block: Block, rows: int, capacity: int, slots: Mapping[Reach, int]) -> None:
        self._block = block
        attention, held = block.attention, slots[block.attention.reach]
        self._attend: LatentCache | KeyValueCache
        if isinstance(attention, MultiLatentAttention):
            self._attend = LatentCache(attention, rows, capacity, held)
        else:
            self._attend = KeyValueCache(attention, rows, capacity, held)

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """Map hidden states [b, s, h] to (hidden states [b, s, h],)."""
        (hidden,) = inputs
        return (self._block.around(lambda x, _: self._attend(x, context), hidden, None),)


class KeyValueCache:
    """Attention that caches the keys and values of every head."""

    def __init__(self, attention: Attention, rows: int, capacity: int, slots: int) -> None:
        self._attention, self._capacity = attention, capacity
        shape = (rows, attention.kv_groups, slots, attention.head_dim)
        # Zeros, since a hidden position still takes part in the sum, with weight 0.
        self._keys = attention.qkv.weight.new_zeros(shape)
        self._values = attention.qkv.weight.new_zeros(shape)

    def __call__(self, x: Tensor, context: DecodingContext) -> Tensor:
        """Map hidden states [b, s, h] of new tokens to [b, s, h]."""
        attention = self._attention
        batch, new, _ = x.shape
        groups, heads, width = attention.kv_groups, attention.heads_per_group, attention.head_dim
        qkv = attention.qkv(x, None).view(batch, new, groups, heads + 2, width)
        query, key, value = qkv.split([heads, 1, 1], dim=3)
        query = _placed(attention, query, attention.query_norm, context.positions, self._capacity)
        key = _placed(attention, key, attention.key_norm, context.positions, self._capacity)
        keys, values = self._keys[context.rows], self._values[context.rows]
        context.store(attention.reach, keys, key.squeeze(3))
        context.store(attention.reach, values, value.squeeze(3))
        return attention.project(_mixed(attention, query, keys, values, context), None)


class LatentCache:
    """Multi-latent attention that caches each token's latent and shared rotated key, which the heads of all tensor
    ranks have in common: c + r numbers per token instead of keys and values of all heads.

    The matrix that maps latents to keys is applied to queries, and the one that maps latents to values is applied to
    mixed latents, so that neither keys nor values exist (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): all heads
    attend to one key.
    """

    def __init__(self, attention: MultiLatentAttention, rows: int, capacity: int, slots: int) -> None:
        self._attention, self._capacity = attention, capacity
        channels = attention.kv_down.weight.shape[0]
        self._latents = attention.kv_down.weight.new_zeros((rows, 1, slots, channels))

    def __call__(self, x: Tensor, context: DecodingContext) -> Tensor:
        """Map hidden states [b, s, h] of new tokens to [b, s, h]."""
        attention, capacity = self._attention, self._capacity
        up = attention.kv_up.weight.unflatten(0, (attention.kv_groups, -1))
        of_keys, of_values = up.tensor_split([-attention.value_dim], dim=1)
        query = _placed(attention, attention.queries(x, None), None, context.positions, capacity).squeeze(3)
        latent, shared = attention.latents(x, None)
        shared = _placed(attention, shared[:, :, None, None], None, context.positions, capacity)[:, :, 0, 0]
        rotated, own = query.split([shared.shape[-1], of_keys.shape[1]], dim=-1)
        query = torch.cat([torch.einsum("bshd,hdc->bshc", own, of_keys), rotated], dim=-1)
        latents = self._latents[context.rows]
        context.store(attention.reach, latents, torch.cat([latent, shared], -1).unsqueeze(2))
        # Drop the mixed channels of the shared keys, which are there because fused kernels need values as wide as
        # keys.
        mixed = _mixed(attention, query.unsqueeze(2), latents, latents, context).flatten(2, -2)
        return attention.project(torch.einsum("bshc,hdc->bshd", mixed[..., : latent.shape[-1]], of_values), None)


def _mixed(attention: Attention, query: Tensor, keys: Tensor, values: Tensor, context: DecodingContext) -> Tensor:
    """Return mixed values [b, s, kv groups, heads, d] or [b, s, heads, d] of query [b, s, kv groups, heads, d] and of
    cached keys and values [b, kv groups, slots, d]."""
    batch, new, groups, heads, width = query.shape
    held = context.held[attention.reach]
    visible, length = held.visible, held.visible.shape[-1]
    if attention.softcap is not None or attention.in_pieces is not None:
        query = query.flatten(2, 3).transpose(1, 2)
        seen = Seen(visible=visible.unsqueeze(1))
        how = attention.weighing(context.positions.unsqueeze(1), held.positions.unsqueeze(1))
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
    """Maps hidden states to the logits after one token of each text (no others are computed), or to scores of
    targets."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, *inputs: Tensor, context: DecodingContext) -> tuple[Tensor]:
        """Map hidden states [b, s, h] to (logits over the true vocabulary [b, v],).

        With targets, map them to (float32 [b, s, 2],): the log probability of each target, and 1 if it is the most
        likely token, otherwise 0.
        """
        (hidden,), head = inputs, self._head
        if context.targets is not None:
            logits = head.output.logits(head.normalised(hidden, None), None).float()
            targets = context.targets.unsqueeze(-1)
            scores = logits.log_softmax(dim=-1).gather(-1, targets)
            return (torch.cat([scores, (logits.argmax(dim=-1, keepdim=True) == targets).float()], dim=-1),)
        wanted = hidden[torch.arange(len(hidden), device=hidden.device), context.last].unsqueeze(1)
        return (head.output.logits(head.normalised(wanted, None), None).squeeze(1),)


def decoding_layer(layer: object, *, rows: int, capacity: int, slots: Mapping[Reach, int]) -> DecodingLayer:
    """Return the decoding form of a layer that `build_layer` returned, with the same parameters.

    rows: number of texts. capacity: maximum tokens of each. slots: result of `cache_slots`.
    """
    if isinstance(layer, Embedding):
        return DecodingEmbedding(layer)
    if isinstance(layer, Block):
        return DecodingBlock(layer, rows, capacity, slots)
    if isinstance(layer, Head):
        return DecodingHead(layer)
    raise TypeError(f"{type(layer).__name__} is not an Embedding, Block or Head of a GPT")


def _placed(attention: Attention, x: Tensor, norm: Norm | None, positions: Tensor, capacity: int) -> Tensor:
    """Normalise and rotate [b, s, kv groups, heads, d], each token by its own position."""
    if norm is not None:
        x = norm(x, None)
    if attention.rotary is None:
        return x
    cosine, sine = (each[positions.flatten()] for each in attention.rotary.tables(capacity, x))
    return rotated(x, cosine, sine, attention.kernels, own_positions=True)
