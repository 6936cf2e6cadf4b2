"""Norms in Triton: the functions and arguments of `megapipe.kernels.reference.norms`.

Statistics are fp32. Any width, any strides.

Rows of up to `RESIDENT` elements (`RESIDENT_UNALIGNED` if they are not read 16 bytes at a time) stay in registers
between the statistics and the result, so that each element is read once. Longer rows are read in chunks, first from
memory and then from the cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.norms import norm_functions, statistic_of, unit_offset, without_bias
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import Launch, over_rows
from megapipe.kernels.triton_backend.norms_backward import norm_gradients
from megapipe.kernels.triton_backend.tiles import product


@triton.jit
def _resident_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    width,
    epsilon,
    num_rows,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of ROWS whole rows. CENTER: a layer norm, which has a bias; otherwise an RMS norm. ADD: the sum of x and
    the residual is normalised, and stored in `total`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < num_rows
    mask = inside[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        # The sum is rounded before it is normalised, as it is without this fusion.
        value = (value + tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + offset, value, mask=mask)
        value = value.to(tl.float32)
    if CENTER:
        center = tl.sum(value, axis=1) / width
        tl.store(mean + row, center, mask=inside)
        value = tl.where(mask, value - center[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(product(value, value), axis=1) / width + epsilon)
    tl.store(rstd + row, scale, mask=inside)
    result = value * scale[:, None] * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if CENTER:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _element(x, residual, offset, mask, ADD: tl.constexpr):
    """Return elements of the row that is normalised, in fp32."""
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _chunked_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    width,
    epsilon,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of one row that is too long for registers, in passes over BLOCK columns. CENTER, ADD: as in
    `_resident_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    first = row * width
    center = 0.0
    if CENTER:
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            sums += _element(x, residual, first + column, column < width, ADD)
        center = tl.sum(sums, axis=0) / width
        tl.store(mean + row, center)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _element(x, residual, first + column, column < width, ADD)
        value = tl.where(column < width, value - center, 0.0)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=0) / width + epsilon)
    tl.store(rstd + row, scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        value = _element(x, residual, first + column, mask, ADD)
        if ADD:
            tl.store(total + first + column, value.to(total.dtype.element_ty), mask=mask)
        result = (value - center) * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            result += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + first + column, result.to(y.dtype.element_ty), mask=mask)


def forward_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    epsilon: float,
) -> Launch:
    """Return the launch that reads x and residual, and writes y, total, mean and rstd. Without bias and mean it is an
    rms norm."""
    values = (x, residual, weight, bias, y, total, mean, rstd, x.shape[-1], epsilon)
    constants = {"CENTER": mean is not None, "ADD": residual is not None}
    return over_rows(_resident_kernel, _chunked_kernel, x, values, constants)


def _forward(
    op: str, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    x, weight, *bias = (tensor.contiguous() for tensor in (x, *parameters))
    residual = None if residual is None else residual.contiguous()
    y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    mean, rstd = statistic_of(x) if bias else None, statistic_of(x)
    forward_launch(x, residual, weight, bias[0] if bias else None, y, total, mean, rstd, epsilon).run()
    return tuple(tensor for tensor in (y, total, mean, rstd) if tensor is not None)


layer_norm = norm_functions("layer_norm", "triton", _forward, norm_gradients)
rms_norm = norm_functions("rms_norm", "triton", _forward, norm_gradients)
layer_norm_without_bias = without_bias(layer_norm)
rms_norm_unit_offset = unit_offset(rms_norm)
