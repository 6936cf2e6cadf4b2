"""Saved bytes that the ops of a layer declare, for tests that compare them with counted bytes or closed forms."""

from collections.abc import Collection
from typing import Any

from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.spec.layers import layer_ops
from megapipe.spec.ops import (
    AttentionPath,
    ContextAttention,
    MicrobatchShape,
    Precision,
    exchanges,
    saved_bytes,
    weight_half_bytes,
)
from megapipe.spec.parameters import LayerSpec


def predicted_bytes(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    attention: AttentionPath = "sdpa",
    *,
    recompute: Collection[Part] = (),
    halves: bool = False,
    **fields: Any,
) -> int:
    """Return the bytes from a forward to its backward, or between the halves of a split backward.

    fields: further ones of `MicrobatchShape`.
    """
    shape = MicrobatchShape(
        model, micro_size, sequence_length, precision, attention, recompute=frozenset(recompute), **fields
    )
    return (weight_half_bytes if halves else saved_bytes)(layer_ops(layer.kind, shape), recompute)


def message_bytes(
    model: ModelConfig, micro_size: int, sequence_length: int, precision: Precision, **fields: Any
) -> int:
    """Return the bytes of the residual stream: of a message between stages."""
    return MicrobatchShape(model, micro_size, sequence_length, precision, **fields).own_stream


def sent_bytes(
    model: ModelConfig,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    kind: ContextAttention,
    context: int,
    **fields: Any,
) -> tuple[int, int]:
    """Return the bytes that a context rank sends for one block and micro-batch, forward and backward."""
    shape = MicrobatchShape(
        model, micro_size, sequence_length, precision, context_attention=kind, context=context, **fields
    )
    ops = layer_ops("block", shape)
    both, forward = (
        sum(each.sent(context) for each in exchanges(ops, forwards=n)["context"]) if context > 1 else 0.0
        for n in (1, 2)
    )
    return round(forward - both), round(2 * both - forward)
