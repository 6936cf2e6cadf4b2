"""Backward of both norms in Triton: the gradient of x, the gradients of weight and bias, or all of them.

Rows are divided into groups, whose number depends only on the shape. A program processes one group: if rows have up to
`RESIDENT` elements (`RESIDENT_UNALIGNED` if they are not read 16 bytes at a time), it reads dy and x once, writes the
gradient of x, and adds up its group's part of the gradients of weight and bias in registers. A second kernel adds the
parts in a fixed order, without atomics, so the bits are the same each time, and the order is the same on every GPU.
Each half of a split backward is the same kernel, without the results of the other half. Longer rows use a separate
kernel for each half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.triton_backend.launch import (
    Launch,
    ceiling_division,
    power_of_two,
    stays_on_chip,
)
from megapipe.kernels.triton_backend.tiles import product


@triton.jit
def resident_kernel(
    dy,
    x,
    dx_residual,
    weight,
    mean,
    rstd,
    dx,
    weight_parts,
    bias_parts,
    num_rows,
    width,
    group,
    CENTER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INPUT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Input gradients of a group of rows, and the group's sums for the weight and the bias, from one read of each row.

    Each program works on `group` rows in tiles of ROWS x BLOCK. CENTER: a layer norm, whose rows have a mean and
    whose bias has a gradient; otherwise an RMS norm. RESIDUAL: `dx_residual` [num_rows, width] is added to the
    input gradient. INPUT, WEIGHT: which of the two gradients are computed. weight_parts, bias_parts: fp32
    [programs, width], one row per program, which `add_parts_kernel` sums.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    within = column < width
    if INPUT:
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    last = tl.minimum((program + 1) * group, num_rows)
    # Two stages: the next tile is copied to shared memory while this one is processed.
    for start in tl.range(0, group, ROWS, num_stages=2):
        row = program * group + start + tl.arange(0, ROWS)
        inside = row < last
        mask = inside[:, None] & within[None, :]
        offset = row[:, None] * width + column[None, :]
        gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=inside, other=0.0)[:, None]
        if CENTER:
            value -= tl.load(mean + row, mask=inside, other=0.0)[:, None]
        value *= scale
        if WEIGHT:
            weight_sum = tl.fma(gradient, value, weight_sum)
            bias_sum += gradient
        if INPUT:
            gradient = product(gradient, factor + tl.zeros_like(gradient))
            along = (tl.sum(product(gradient, value), axis=1) / width)[:, None]
            if CENTER:
                gradient -= (tl.sum(gradient, axis=1) / width)[:, None]
            result = gradient - value * along
            result *= scale
            if RESIDUAL:
                result += tl.load(dx_residual + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
    if WEIGHT:
        part = program * width + column
        tl.store(weight_parts + part, tl.sum(weight_sum, axis=0), mask=within)
        if CENTER:
            tl.store(bias_parts + part, tl.sum(bias_sum, axis=0), mask=within)


@triton.jit
def chunked_input_kernel(
    dy,
    x,
    dx_residual,
    weight,
    mean,
    rstd,
    dx,
    width,
    CENTER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Input gradient of one row that is too wide for registers: one pass for its sums, another for the result.

    CENTER and RESIDUAL: as in `resident_kernel`. BLOCK: number of columns at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    first = row * width
    scale = tl.load(rstd + row)
    center = 0.0
    if CENTER:
        center = tl.load(mean + row)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gradient = tl.load(dy + first + column, mask=mask, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + first + column, mask=mask, other=0.0).to(tl.float32) - center) * scale
        products = tl.fma(gradient, value, products)
        sums += gradient
    along = tl.sum(products, axis=0) / width
    shift = 0.0
    if CENTER:
        shift = tl.sum(sums, axis=0) / width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gradient = tl.load(dy + first + column, mask=mask, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + first + column, mask=mask, other=0.0).to(tl.float32) - center) * scale
        result = (gradient - value * along - shift) * scale
        if RESIDUAL:
            result += tl.load(dx_residual + first + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + first + column, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def chunked_weight_kernel(
    dy,
    x,
    mean,
    rstd,
    weight_parts,
    bias_parts,
    num_rows,
    width,
    group,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums for the weight and the bias over a group of rows, for BLOCK columns.

    Axis 0 of the programs is over groups of rows, axis 1 over blocks of columns. weight_parts, bias_parts, CENTER: as
    in `resident_kernel`.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * group, tl.minimum((program + 1) * group, num_rows)):
        gradient = tl.load(dy + row * width + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            value -= tl.load(mean + row)
        weight_sum = tl.fma(gradient, value * tl.load(rstd + row), weight_sum)
        bias_sum += gradient
    tl.store(weight_parts + program * width + column, weight_sum, mask=mask)
    if CENTER:
        tl.store(bias_parts + program * width + column, bias_sum, mask=mask)


@triton.jit
def add_parts_kernel(
    parts,
    weight_gradient,
    bias_gradient,
    num_parts,
    width,
    CENTER: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the parts of all groups. Index 0 of axis 1 is for the weight's parts, index 1 for the bias's parts, which
    follow them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts += tl.program_id(1).to(tl.int64) * num_parts * width
    sums = tl.zeros([PARTS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < num_parts)[:, None] & (column < width)[None, :]
        sums += tl.load(parts + part.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0).to(weight_gradient.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(weight_gradient + column, total, mask=column < width)
    else:
        if CENTER:
            tl.store(bias_gradient + column, total, mask=column < width)


RESIDENT, RESIDENT_UNALIGNED = 8192, 2048
_TILE, _CHUNK, _ELEMENTS_PER_WARP, _UNALIGNED_PER_WARP = 4096, 4096, 512, 256
_MOST_GROUPS, _LEAST_TILES = 256, 4
_COLUMNS, _PARTS, _WEIGHT_CHUNK = 64, 64, 2048


class Operands(NamedTuple):
    """Inputs of the backward: dy and x [..., h], the other part of dx, the weight, and the statistics.

    mean is None for the rms norm. Everything is contiguous.
    """

    dy: Tensor
    x: Tensor
    dx_residual: Tensor | None
    weight: Tensor
    mean: Tensor | None
    rstd: Tensor


def norm_gradients(
    op: str,
    dy: Tensor,
    x: Tensor,
    statistics: Sequence[Tensor],
    weight: Tensor,
    dx_residual: Tensor | None,
    of_x: bool,
    of_parameters: bool,
) -> list[Tensor]:
    """Return gradients of a norm, as `megapipe.kernels.reference.norms.Gradients` describes, for any strides."""
    mean = statistics[0] if op == "layer_norm" else None
    tensors = (dy, x, dx_residual, weight, mean, statistics[-1])
    operands = Operands(*(None if tensor is None else tensor.contiguous() for tensor in tensors))  # type: ignore[arg-type]
    tiling = RowTiling.of(x)
    dx, parts, gradients = torch.empty_like(operands.x) if of_x else None, None, list[Tensor]()
    if of_parameters:
        parts = x.new_empty(len(statistics), tiling.num_groups, tiling.width, dtype=torch.float32)
        gradients = [torch.empty_like(operands.weight) for _ in statistics]
    for launch in launches(operands, dx, parts):
        launch.run()
    if parts is not None:
        add_parts_launch(parts, gradients).run()
    return gradients if dx is None else [dx, *gradients]


@dataclass(frozen=True)
class RowTiling:
    """The division of rows into groups of `group` rows, and of groups into tiles of `rows` x `block`."""

    num_rows: int
    width: int
    block: int
    rows: int
    group: int
    num_groups: int

    @staticmethod
    def of(x: Tensor) -> "RowTiling":
        """Return the tiling of x [..., h], which depends only on its shape."""
        width = x.shape[-1]
        num_rows = x.numel() // width
        block = power_of_two(width)
        rows = max(1, _TILE // block)
        tiles = max(_LEAST_TILES, ceiling_division(num_rows, _MOST_GROUPS * rows))
        return RowTiling(num_rows, width, block, rows, tiles * rows, ceiling_division(num_rows, tiles * rows))


def launches(operands: Operands, dx: Tensor | None, parts: Tensor | None) -> list[Launch]:
    """Return the launches that write dx and each group's parts of the gradients of the weight and, for the layer norm,
    of the bias, without those that are None. It is one launch for rows that stay on chip.

    parts: fp32 [1 or 2, groups, h].
    """
    tiling = RowTiling.of(operands.x)
    width = tiling.width
    rows = tiling.num_rows, width, tiling.group
    by_parameter = (*(() if parts is None else parts), None, None)[:2]
    constants: dict[str, int] = {"CENTER": operands.mean is not None, "RESIDUAL": operands.dx_residual is not None}
    if stays_on_chip(width, RESIDENT, RESIDENT_UNALIGNED):
        constants |= {"INPUT": dx is not None, "WEIGHT": parts is not None}
        constants |= {"ROWS": tiling.rows, "BLOCK": tiling.block}
        warps = tiling.rows * tiling.block // (_ELEMENTS_PER_WARP if width % 16 == 0 else _UNALIGNED_PER_WARP)
        values = (*operands, dx, *by_parameter, *rows)
        return [Launch(resident_kernel, (tiling.num_groups,), values, constants, warps)]
    chunked = []
    if dx is not None:
        warps = _CHUNK // _ELEMENTS_PER_WARP
        constants["BLOCK"] = _CHUNK
        chunked.append(Launch(chunked_input_kernel, rows[:1], (*operands, dx, width), constants, warps))
    if parts is not None:
        grid = (tiling.num_groups, ceiling_division(width, _WEIGHT_CHUNK))
        values = (operands.dy, operands.x, operands.mean, operands.rstd, *by_parameter, *rows)
        centered = {"CENTER": operands.mean is not None, "BLOCK": _WEIGHT_CHUNK}
        chunked.append(Launch(chunked_weight_kernel, grid, values, centered, _WEIGHT_CHUNK // 256))
    return chunked


def add_parts_launch(parts: Tensor, gradients: Sequence[Tensor]) -> Launch:
    """Return the launch that writes the sums of the parts."""
    num_gradients, num_parts, width = parts.shape
    values = (parts, *(*gradients, None)[:2], num_parts, width)
    constants = {"CENTER": num_gradients > 1, "PARTS": _PARTS, "COLUMNS": _COLUMNS}
    return Launch(add_parts_kernel, (ceiling_division(width, _COLUMNS), num_gradients), values, constants, 8)
