"""Dropout in Triton, by itself and between a bias and a residual: the functions of
`megapipe.kernels.reference.dropout`.

No mask is stored: the backward recomputes it. `dropout`, for activations and attention weights, reads keys and
channels through their broadcast strides, so that neither grows to the size of the dropped tensor.
`bias_dropout_residual` rounds once.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.registry import opaque
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.kernels.triton_backend.tiles import kept, over_tiles, signed_threshold, tile_indices


@triton.jit
def _dropout_kernel(
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
    """x and y are contiguous [outer, middle, inner, width]; the strides of keys and channels are passed."""
    row, column = tile_indices(width, ROWS, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    inside = row < num_rows
    mask = inside[:, None] & (column < width)[None, :]
    first, second, third = row // (middle * inner), row // inner % middle, row % inner
    key = tl.load(keys + first * key_outer + second * key_middle + third * key_inner, mask=inside, other=0)
    source = first * channel_outer + second * channel_middle + third * channel_inner
    channel = tl.load(channels + source[:, None] + (column * channel_column)[None, :], mask=mask, other=0)
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    # A product, so that a dropped NaN or infinity becomes NaN, as in torch.
    value = value * tl.where(kept(key[:, None], channel, threshold), scale, 0.0)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


def _dropout_launch(x: Tensor, keys: Tensor, channels: Tensor, y: Tensor, probability: float) -> Launch:
    outer, middle, inner = math.prod(x.shape[:-3]), *(1, 1, *x.shape[:-1])[-2:]
    # Views, unless x has more than four axes.
    keys = keys.expand(*x.shape[:-1], 1).reshape(outer, middle, inner, 1)
    channels = channels.expand(x.shape).reshape(outer, middle, inner, x.shape[-1])
    strides = (*keys.stride()[:3], *channels.stride())
    threshold, scale = signed_threshold(probability), 1.0 / (1.0 - probability)
    return over_tiles(_dropout_kernel, (x, keys, channels, y), x, threshold, scale, middle, inner, *strides)


def _dropout_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, keys, channels, ctx.probability = inputs
    ctx.save_for_backward(keys, channels)


def _dropout_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    keys, channels = ctx.saved_tensors
    return dropout(dy, keys, channels, ctx.probability), None, None, None


@opaque(
    "dropout_triton(Tensor x, Tensor keys, Tensor channels, float probability) -> Tensor",
    lambda x, keys, channels, probability: x.new_empty(x.shape),
    _dropout_setup_context,
    _dropout_backward,
)
def dropout(x: Tensor, keys: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Zero elements of x [..., c] with `probability` and divide the others by 1 - probability.

    keys: of the tokens (`megapipe.kernels.reference.dropout.token_keys`), int32, broadcast to [..., 1]. channels:
    global channel numbers, int32, broadcast to the shape of x.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    _dropout_launch(x, keys, channels, y, probability).run()
    return y


@triton.jit
def _bias_dropout_residual_kernel(
    x, bias, residual, keys, y, num_rows, width, threshold, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Without bias and residual, this kernel is the backward."""
    row, column = tile_indices(width, ROWS, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    key = tl.load(keys + row, mask=row < num_rows, other=0)
    # A product, so that a dropped NaN or infinity becomes NaN, as in torch.
    value = value * tl.where(kept(key[:, None], column[None, :], threshold), scale, 0.0)
    if residual is not None:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


def _bias_dropout_residual_launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor, y: Tensor, probability: float
) -> Launch:
    threshold, scale = signed_threshold(probability), 1.0 / (1.0 - probability)
    return over_tiles(_bias_dropout_residual_kernel, (x, bias, residual, keys, y), x, threshold, scale)


@opaque(
    "dropout_input_gradient_triton(Tensor dy, Tensor keys, float probability) -> Tensor",
    lambda dy, keys, probability: dy.new_empty(dy.shape),
)
def _bias_dropout_residual_input_gradient(dy: Tensor, keys: Tensor, probability: float) -> Tensor:
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    _bias_dropout_residual_launch(dy, None, None, keys.contiguous(), dx, probability).run()
    return dx


def _bias_dropout_residual_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, keys, ctx.probability = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(keys)


def _bias_dropout_residual_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (keys,) = ctx.saved_tensors
    needs_x, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    dx = _bias_dropout_residual_input_gradient(dy, keys, ctx.probability) if needs_x or needs_bias else None
    dbias = dx.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias and dx is not None else None
    return dx, dbias, dy if needs_residual else None, None, None


@opaque(
    "bias_dropout_residual_triton(Tensor x, Tensor? bias, Tensor residual, Tensor keys, float probability) -> Tensor",
    lambda x, bias, residual, keys, probability: x.new_empty(x.shape),
    _bias_dropout_residual_setup_context,
    _bias_dropout_residual_backward,
)
def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias), for x and residual [..., h] of the same dtype, and bias [h].

    keys: int32 [...], of the tokens (`megapipe.kernels.reference.dropout.token_keys`). Channels are those of the last
    axis, counted from 0. probability: of zeroing an element.
    """
    x, residual = x.contiguous(), residual.contiguous()
    y = torch.empty_like(x)
    _bias_dropout_residual_launch(
        x, None if bias is None else bias.contiguous(), residual, keys.contiguous(), y, probability
    ).run()
    return y
