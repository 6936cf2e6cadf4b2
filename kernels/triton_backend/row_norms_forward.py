"""Forward of both norms in Triton, with an optional addition of a residual before.

Rows up to `RESIDENT` elements (`RESIDENT_UNALIGNED`, where they are not read 16 bytes at a time) stay in registers
between the statistics and the result, so that each element is read once. Longer rows are read in chunks, first from
memory and then from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two, stays_on_chip
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import product

RESIDENT, RESIDENT_UNALIGNED = 16384, 8192
_TILE, _CHUNK, _ELEMENTS_PER_WARP = 4096, 4096, 512


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
    num_rows,
    width,
    epsilon,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    """Elements of the row that is normalised, in fp32."""
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


def statistic_of(x: Tensor) -> Tensor:
    """Room for one fp32 number a row, [..., 1]."""
    return x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


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
    """x and residual are read; y, total, mean and rstd written. Without bias and mean it is the rms norm."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    arguments = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "bias": bias,
        "y": y,
        "total": total,
        "mean": mean,
        "rstd": rstd,
        "width": width,
        "epsilon": epsilon,
    }
    constants: dict[str, int] = {"CENTER": mean is not None, "ADD": residual is not None}
    if not stays_on_chip(width, RESIDENT, RESIDENT_UNALIGNED):
        constants["BLOCK"] = _CHUNK
        return Launch(_chunked_kernel, (num_rows,), arguments, constants, _CHUNK // _ELEMENTS_PER_WARP)
    block = power_of_two(width)
    rows = max(1, _TILE // block)
    return Launch(
        _resident_kernel,
        (ceiling_division(num_rows, rows),),
        arguments | {"num_rows": num_rows},
        constants | {"ROWS": rows, "BLOCK": block},
        rows * block // _ELEMENTS_PER_WARP,
    )


def specimens() -> list[Specimen]:
    """Rows of a small and a typical model, the longest that stay in registers, and chunks."""
    return [_specimen(width, center, add) for width, center, add in _SHAPES]


_SHAPES = [
    (768, True, True),
    (4096, True, False),
    (4096, False, True),
    (RESIDENT, True, True),
    (2 * RESIDENT, True, True),
    (RESIDENT_UNALIGNED - 1, True, True),
]


def _specimen(width: int, center: bool, add: bool) -> Specimen:
    x, weight, statistic = meta(8192, width, dtype=torch.bfloat16), meta(width), meta(8192, 1)
    launch = forward_launch(
        x,
        x if add else None,
        weight,
        weight if center else None,
        x,
        x if add else None,
        statistic if center else None,
        statistic,
        1e-5,
    )
    name = f"{'add and ' if add else ''}{'layer' if center else 'rms'} norm, forward, bf16 {width}"
    if width % 16:
        return Specimen(name, launch, loads=0, stores=0)
    return Specimen(name, launch, loads=2 + center + add, stores=1 + add)
