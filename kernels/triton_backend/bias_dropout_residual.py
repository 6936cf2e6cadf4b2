"""Residual plus dropout in Triton: the function of `megapipe.kernels.reference.bias_dropout_residual`.

No mask is stored: the backward computes it again from the tokens' keys. Rounded once.
"""

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
def _kernel(x, bias, residual, keys, y, num_rows, width, threshold, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """With neither bias nor residual it is the backward."""
    row, column = tile_indices(width, ROWS, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    key = tl.load(keys + row, mask=row < num_rows, other=0)
    # A product, so that a dropped NaN or infinity is as much of a NaN as in torch.
    value = value * tl.where(kept(key[:, None], column[None, :], threshold), scale, 0.0)
    if residual is not None:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor, y: Tensor, probability: float
) -> Launch:
    width, num_rows = x.shape[-1], num_rows_of(x)
    tile = tile_of(width, x.dtype)
    arguments = {
        "x": x,
        "bias": bias,
        "residual": residual,
        "keys": keys,
        "y": y,
        "num_rows": num_rows,
        "width": width,
        "threshold": signed_threshold(probability),
        "scale": 1.0 / (1.0 - probability),
    }
    return Launch(_kernel, tile.grid(num_rows, width), arguments, tile.constants(), NUM_WARPS)


@opaque(
    "dropout_input_gradient_triton(Tensor dy, Tensor keys, float probability) -> Tensor",
    lambda dy, keys, probability: dy.new_empty(dy.shape),
)
def _input_gradient(dy: Tensor, keys: Tensor, probability: float) -> Tensor:
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    _launch(dy, None, None, keys.contiguous(), dx, probability).run()
    return dx


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, keys, ctx.probability = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(keys)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (keys,) = ctx.saved_tensors
    needs_x, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    dx = _input_gradient(dy, keys, ctx.probability) if needs_x or needs_bias else None
    dbias = dx.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias and dx is not None else None
    return dx, dbias, dy if needs_residual else None, None, None


@opaque(
    "bias_dropout_residual_triton(Tensor x, Tensor? bias, Tensor residual, Tensor keys, float probability) -> Tensor",
    lambda x, bias, residual, keys, probability: x.new_empty(x.shape),
    _setup_context,
    _backward,
)
def apply(x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, probability: float) -> Tensor:
    """residual + dropout(x + bias), for x and residual [..., h] of one dtype, and bias [h].

    keys: int32 [...], of the tokens (`megapipe.kernels.reference.dropout.token_keys`). Channels are those of the last
    axis, counted from 0. probability: of zeroing an element.
    """
    x, residual = x.contiguous(), residual.contiguous()
    y = torch.empty_like(x)
    _launch(x, None if bias is None else bias.contiguous(), residual, keys.contiguous(), y, probability).run()
    return y


def specimens() -> list[Specimen]:
    """Rows of a small and a large model, and the backward."""
    small, large = meta(8192, 768), meta(8192, 8192, dtype=torch.bfloat16)
    bias, keys = meta(8192, dtype=torch.bfloat16), meta(8192, dtype=torch.int32)
    return [
        Specimen("dropout residual fp32 768", _launch(small, None, small, keys, small, 0.1), loads=2, stores=1),
        Specimen("bias dropout residual bf16 8192", _launch(large, bias, large, keys, large, 0.1), loads=3, stores=1),
        Specimen("dropout backward bf16 8192", _launch(large, None, None, keys, large, 0.1), loads=1, stores=1),
    ]
