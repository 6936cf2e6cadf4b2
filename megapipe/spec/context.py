"""What a rank keeps and sends where several ranks share every sample (context parallelism)."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.spec.bert_memory import bert_activation_bytes, padding_mask_bytes
from megapipe.spec.communication import Exchange
from megapipe.spec.memory import (
    ELEMENT_BYTES,
    FULL_BYTES,
    AttentionPath,
    Precision,
    activation_bytes,
    attention_bytes,
)
from megapipe.spec.parameters import LayerSpec

ContextAttention = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class ContextBytes:
    """Bytes that one rank sends to others of its context group for one layer's attention and one micro-batch."""

    forward: int
    backward: int


def context_activation_bytes(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    attention: AttentionPath,
    kind: ContextAttention,
    context_size: int,
    *,
    predictions: int = 0,
    tensor_size: int = 1,
    alignment: int = 1,
    recompute_logits: bool = False,
    recompute: Collection[RecomputedPart] = (),
    sequence_parallel: bool = False,
    mask_bytes: int = 1,
) -> int:
    """As `activation_bytes`, or `bert_activation_bytes` for a BERT, on one of context_size ranks that share samples of
    sequence_length tokens. predictions: hidden tokens of a sample that a BERT's rank holds.

    Everything is kept for the rank's own tokens alone. A ring keeps of its attention what sdpa would for these
    tokens, whatever its path: query, key, value, result, log-sums. all_to_all keeps what the path keeps for its share
    of heads and whole samples, key and value heads as often as it sent them, and the result as it came back besides.
    """
    local = sequence_length // context_size
    path: AttentionPath = attention if context_size == 1 else "sdpa"
    if isinstance(model, BertModelConfig):
        kept = bert_activation_bytes(
            model,
            layer,
            micro_size,
            local,
            predictions,
            precision,
            path,
            tensor_size=tensor_size,
            alignment=alignment,
            recompute_logits=recompute_logits,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            mask_bytes=mask_bytes,
        )
    else:
        kept = activation_bytes(
            model,
            layer,
            micro_size,
            local,
            precision,
            path,
            tensor_size=tensor_size,
            alignment=alignment,
            recompute_logits=recompute_logits,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            mask_bytes=mask_bytes,
        )
    if layer.kind != "block" or context_size == 1:
        return kept
    padded = isinstance(model, BertModelConfig)
    if padded:
        kept -= padding_mask_bytes(micro_size, local, precision, "sdpa")
    if kind == "ring":
        return kept
    size = ELEMENT_BYTES[precision]
    kept -= attention_bytes(model, micro_size, local, size, "sdpa", tensor_size, again=False) // tensor_size
    kept += padding_mask_bytes(micro_size, sequence_length, precision, attention) if padded else 0
    # Heads come placed and normalised, so that attention itself is that of a model without either.
    copied = _copied_kv_heads(model, context_size, tensor_size)
    bare = replace(model, positions="none", qk_norm=False, num_kv_heads=copied)
    ranks = tensor_size * context_size
    kept += (
        attention_bytes(
            bare, micro_size, sequence_length, size, attention, ranks, "attention" in recompute, mask_bytes
        )
        // ranks
    )
    query, key = (micro_size * local * heads // tensor_size for heads in (model.num_heads, model.kv_heads))
    if attention == "sdpa":  # its backward reads the result, and the output product what came back of it
        kept += query * model.head_dim * size
    if model.qk_norm:
        kept += (query + 2 * key) * model.head_dim * size + (query + key) * FULL_BYTES
    return kept


def ring_bytes(
    model: ModelConfig,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    context_size: int,
    *,
    tensor_size: int = 1,
) -> ContextBytes:
    """Keys and values go round once forward; backward they do so again, their gradients with them in fp32."""
    tokens = micro_size * sequence_length // context_size
    block = 2 * tokens * (model.kv_heads // tensor_size) * model.head_dim
    hops = context_size - 1
    size = ELEMENT_BYTES[precision]
    return ContextBytes(hops * block * size, hops * block * (size + FULL_BYTES))


def all_to_all_bytes(
    model: ModelConfig,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    context_size: int,
    *,
    tensor_size: int = 1,
) -> ContextBytes:
    """Query, key, value and result of the rank's tokens, but for the share that stays; the gradients likewise."""
    tokens = micro_size * sequence_length // context_size
    keys = _copied_kv_heads(model, context_size, tensor_size)
    heads = (2 * model.num_heads + 2 * keys) // tensor_size
    sent = tokens * heads * model.head_dim * ELEMENT_BYTES[precision] * (context_size - 1) // context_size
    return ContextBytes(sent, sent)


def context_exchanges(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    kind: ContextAttention,
    context_size: int,
    *,
    tensor_size: int = 1,
    forwards: int = 1,
) -> list[Exchange]:
    """The calls that make up `ring_bytes` and `all_to_all_bytes` of one layer and micro-batch, backward included.

    forwards: how often the layer runs forward: 2 where it is recomputed whole.
    """
    if layer.kind != "block":
        return []
    size = ELEMENT_BYTES[precision]
    tokens = micro_size * sequence_length // context_size
    if kind == "ring":
        block = 2 * tokens * (model.kv_heads // tensor_size) * model.head_dim
        hops = context_size - 1
        return [Exchange("send", block, size, hops * (forwards + 1)), Exchange("send", block, FULL_BYTES, hops)]
    keys = _copied_kv_heads(model, context_size, tensor_size)
    heads = (model.num_heads + 2 * keys) // tensor_size, model.num_heads // tensor_size
    return [Exchange("all_to_all", tokens * each * model.head_dim, size, forwards + 1) for each in heads]


def kv_copies(kv_heads: int, heads_each: int, context_size: int) -> int:
    """How often all_to_all sends each key and value head of a tensor rank: once where they divide over the ranks.

    heads_each: query heads of a key head; with copies, each stands for a part of them.
    Raises ValueError where the query heads do not divide either.
    """
    if kv_heads * heads_each % context_size:
        raise ValueError(
            f"{kv_heads * heads_each} query heads cannot be divided evenly over {context_size} context ranks"
        )
    return next(n for n in range(1, heads_each + 1) if heads_each % n == 0 and kv_heads * n % context_size == 0)


def _copied_kv_heads(model: ModelConfig, context_size: int, tensor_size: int) -> int:
    """Key heads of the whole model, those that are sent several times counted so."""
    each = model.num_heads // model.kv_heads
    return model.kv_heads * kv_copies(model.kv_heads // tensor_size, each, context_size)
