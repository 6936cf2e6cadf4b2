"""Dropout in Triton: the function of `megapipe.kernels.reference.dropout`, for activations and attention weights.

No mask is stored: the backward computes it again. Keys and channels are read through their broadcast strides, so that
neither grows to the size of what is dropped.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.triton_backend.dropout_bits import kept, signed_threshold
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, num_rows_of, tile_indices, tile_of


@triton.jit
def _kernel(
    x,
    keys,
    channels,
    y,
    num_rows,
    width,
    threshold,
    scale,
    middle,
    inner,
    key_outer,
    key_middle,
    key_inner,
    channel_outer,
    channel_middle,
    channel_inner,
    channel_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x and y are [outer, middle, inner, width] in order; of keys and channels the strides are given."""
    row, column = tile_indices(width, ROWS, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    inside = row < num_rows
    mask = inside[:, None] & (column < width)[None, :]
    first, second, third = row // (middle * inner), row // inner % middle, row % inner
    key = tl.load(keys + first * key_outer + second * key_middle + third * key_inner, mask=inside, other=0)
    source = first * channel_outer + second * channel_middle + third * channel_inner
    channel = tl.load(channels + source[:, None] + (column * channel_column)[None, :], mask=mask, other=0)
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    # A product, so that a dropped NaN or infinity is as much of a NaN as in torch.
    value = value * tl.where(kept(key[:, None], channel, threshold), scale, 0.0)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


def _launch(x: Tensor, keys: Tensor, channels: Tensor, y: Tensor, probability: float) -> Launch:
    width, num_rows = x.shape[-1], num_rows_of(x)
    outer, middle, inner = math.prod(x.shape[:-3]), *(1, 1, *x.shape[:-1])[-2:]
    # Views, unless x has more than four axes.
    keys = keys.expand(*x.shape[:-1], 1).reshape(outer, middle, inner, 1)
    channels = channels.expand(x.shape).reshape(outer, middle, inner, width)
    tile = tile_of(width, x.dtype)
    arguments = {
        "x": x,
        "keys": keys,
        "channels": channels,
        "y": y,
        "num_rows": num_rows,
        "width": width,
        "threshold": signed_threshold(probability),
        "scale": 1.0 / (1.0 - probability),
        "middle": middle,
        "inner": inner,
        "key_outer": keys.stride(0),
        "key_middle": keys.stride(1),
        "key_inner": keys.stride(2),
        "channel_outer": channels.stride(0),
        "channel_middle": channels.stride(1),
        "channel_inner": channels.stride(2),
        "channel_column": channels.stride(3),
    }
    return Launch(_kernel, tile.grid(num_rows, width), arguments, tile.constants(), NUM_WARPS)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, keys, channels, ctx.probability = inputs
    ctx.save_for_backward(keys, channels)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    keys, channels = ctx.saved_tensors
    return apply(dy, keys, channels, ctx.probability), None, None, None


@opaque(
    "dropout_triton(Tensor x, Tensor keys, Tensor channels, float probability) -> Tensor",
    lambda x, keys, channels, probability: x.new_empty(x.shape),
    _setup_context,
    _backward,
)
def apply(x: Tensor, keys: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Zero elements of x [..., c] with `probability` and divide the others by 1 - probability.

    keys: of the tokens (`megapipe.kernels.reference.dropout.token_keys`), int32, broadcast to [..., 1]. channels:
    global channel numbers, int32, broadcast to the shape of x.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(x, keys, channels, y, probability).run()
    return y


def specimens() -> list[Specimen]:
    """Hidden states, and attention weights of a model with long sequences."""
    hidden, weights = meta(2, 4096, 4096), meta(2, 32, 4096, 4096, dtype=torch.bfloat16)
    keys = meta(2, 4096, dtype=torch.int32)
    channels, by_head = meta(4096, dtype=torch.int32), meta(32, 1, 4096, dtype=torch.int32)
    launches = {
        "hidden states fp32": _launch(hidden, keys.unsqueeze(-1), channels, hidden, 0.1),
        "attention weights bf16": _launch(weights, keys[:, None, :, None], by_head, weights, 0.1),
    }
    return [Specimen(f"dropout of {name}", launch, loads=2, stores=1) for name, launch in launches.items()]
