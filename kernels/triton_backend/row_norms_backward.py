"""Backward of both norms in Triton: the gradient of x, those of weight and bias, or all.

Rows are cut into groups, a number that depends on the shape alone. A program walks one group; over rows of up to
`RESIDENT` elements (`RESIDENT_UNALIGNED`, where not read 16 bytes at a time) it reads dy and x once, writes the
gradient of x and adds up its group's part of the gradients of weight and bias in registers. A second kernel adds the
parts in a fixed order: no atomics, so the same bits each time, and on every GPU the same order. The halves of a split
backward are the same kernel with one of the results left out. Longer rows take one kernel for each half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two, stays_on_chip
from megapipe.kernels.triton_backend.row_norms_backward_kernels import (
    add_parts_kernel,
    chunked_input_kernel,
    chunked_weight_kernel,
    resident_kernel,
)
from megapipe.kernels.triton_backend.specimens import Specimen, meta

RESIDENT, RESIDENT_UNALIGNED = 8192, 2048
_TILE, _CHUNK, _ELEMENTS_PER_WARP, _UNALIGNED_PER_WARP = 4096, 4096, 512, 256
_MOST_GROUPS, _LEAST_TILES = 256, 4
_COLUMNS, _PARTS, _WEIGHT_CHUNK = 64, 64, 2048


@dataclass(frozen=True)
class Operands:
    """What the backward reads: dy and x [..., h], the statistics, the weight, and the part of dx beside the norm.

    mean is None for the rms norm. Everything is contiguous.
    """

    dy: Tensor
    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor
    dx_beside: Tensor | None = None

    @staticmethod
    def contiguous(
        dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dx_beside: Tensor | None = None
    ) -> "Operands":
        """Of tensors with any strides."""
        tensors = (dy, x, mean, rstd, weight, dx_beside)
        return Operands(*(None if tensor is None else tensor.contiguous() for tensor in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RowTiling:
    """How rows are cut into groups, and groups into tiles of `rows` x `block`."""

    num_rows: int
    width: int
    block: int
    rows: int
    group: int
    num_groups: int

    @staticmethod
    def of(x: Tensor) -> "RowTiling":
        """That of [..., h], a function of its shape alone."""
        width = x.shape[-1]
        num_rows = x.numel() // width
        block = power_of_two(width)
        rows = max(1, _TILE // block)
        tiles = max(_LEAST_TILES, ceiling_division(num_rows, _MOST_GROUPS * rows))
        return RowTiling(num_rows, width, block, rows, tiles * rows, ceiling_division(num_rows, tiles * rows))


def input_launch(operands: Operands, dx: Tensor) -> Launch:
    """Writes the gradient of x."""
    if _is_resident(operands):
        return whole_launch(operands, dx, None)
    partition = RowTiling.of(operands.x)
    arguments = vars(operands) | {"dx": dx, "width": partition.width}
    constants = {"CENTER": operands.mean is not None, "BESIDE": operands.dx_beside is not None, "BLOCK": _CHUNK}
    warps = _CHUNK // _ELEMENTS_PER_WARP
    return Launch(chunked_input_kernel, (partition.num_rows,), arguments, constants, warps)


def weight_launch(operands: Operands, parts: Tensor) -> Launch:
    """Writes each group's part of the gradients of the weight and, for the layer norm, of the bias.

    parts: fp32 [1 or 2, groups, h].
    """
    if _is_resident(operands):
        return whole_launch(operands, None, parts)
    partition = RowTiling.of(operands.x)
    arguments = {
        "dy": operands.dy,
        "x": operands.x,
        "mean": operands.mean,
        "rstd": operands.rstd,
        "num_rows": partition.num_rows,
        "width": partition.width,
        "group": partition.group,
        **_named(parts),
    }
    constants = {"CENTER": operands.mean is not None, "BLOCK": _WEIGHT_CHUNK}
    grid = (partition.num_groups, ceiling_division(partition.width, _WEIGHT_CHUNK))
    return Launch(chunked_weight_kernel, grid, arguments, constants, _WEIGHT_CHUNK // 256)


def whole_launch(operands: Operands, dx: Tensor | None, parts: Tensor | None) -> Launch:
    """Writes what is given, for rows that stay on chip."""
    partition = RowTiling.of(operands.x)
    arguments = {
        **vars(operands),
        "dx": dx,
        "num_rows": partition.num_rows,
        "width": partition.width,
        "group": partition.group,
        **_named(parts),
    }
    constants = {
        "CENTER": operands.mean is not None,
        "BESIDE": operands.dx_beside is not None,
        "INPUT": dx is not None,
        "WEIGHT": parts is not None,
        "ROWS": partition.rows,
        "BLOCK": partition.block,
    }
    aligned = partition.width % 16 == 0
    warps = partition.rows * partition.block // (_ELEMENTS_PER_WARP if aligned else _UNALIGNED_PER_WARP)
    return Launch(resident_kernel, (partition.num_groups,), arguments, constants, warps)


def _is_resident(operands: Operands) -> bool:
    return stays_on_chip(operands.x.shape[-1], RESIDENT, RESIDENT_UNALIGNED)


def _named(parts: Tensor | None) -> dict[str, Tensor | None]:
    weight_parts, bias_parts = (None, None) if parts is None else (parts[0], parts[1] if len(parts) > 1 else None)
    return {"weight_parts": weight_parts, "bias_parts": bias_parts}


def add_parts_launch(parts: Tensor, gradients: Sequence[Tensor]) -> Launch:
    """Writes the sums of the parts."""
    num_gradients, num_parts, width = parts.shape
    arguments = {
        "parts": parts,
        "weight_gradient": gradients[0],
        "bias_gradient": gradients[1] if num_gradients > 1 else None,
        "num_parts": num_parts,
        "width": width,
    }
    constants = {"CENTER": num_gradients > 1, "PARTS": _PARTS, "COLUMNS": _COLUMNS}
    return Launch(add_parts_kernel, (ceiling_division(width, _COLUMNS), num_gradients), arguments, constants, 8)


def input_gradient_of(operands: Operands) -> Tensor:
    """The gradient of x."""
    dx = torch.empty_like(operands.x)
    input_launch(operands, dx).run()
    return dx


def weight_gradients_of(operands: Operands) -> tuple[Tensor, ...]:
    """The gradients of the weight and, for the layer norm, of the bias."""
    parts = _empty_parts(operands)
    weight_launch(operands, parts).run()
    return _sums(operands, parts)


def whole_backward_of(operands: Operands) -> tuple[Tensor, ...]:
    """The gradients of x, weight and bias, in one pass where rows stay in registers."""
    if not _is_resident(operands):
        return input_gradient_of(operands), *weight_gradients_of(operands)
    dx, parts = torch.empty_like(operands.x), _empty_parts(operands)
    whole_launch(operands, dx, parts).run()
    return dx, *_sums(operands, parts)


def _empty_parts(operands: Operands) -> Tensor:
    partition = RowTiling.of(operands.x)
    num_gradients = 1 if operands.mean is None else 2
    return operands.x.new_empty(num_gradients, partition.num_groups, partition.width, dtype=torch.float32)


def _sums(operands: Operands, parts: Tensor) -> tuple[Tensor, ...]:
    gradients = tuple(torch.empty_like(operands.weight) for _ in parts)
    add_parts_launch(parts, gradients).run()
    return gradients


def specimens() -> list[Specimen]:
    """Both norms at sizes of a small and a typical model, the longest rows that stay in registers, and chunks."""
    typical, long = _operands(4096, center=True, beside=True), _operands(2 * RESIDENT, center=True, beside=True)
    parts, weight = meta(2, 256, 4096), meta(4096, dtype=torch.bfloat16)
    return [
        _whole(768, center=True, beside=True),
        _whole(4096, center=True, beside=False),
        _whole(4096, center=False, beside=True),
        _whole(RESIDENT, center=True, beside=True),
        _whole(RESIDENT_UNALIGNED - 1, center=True, beside=True),
        Specimen("layer norm, dx alone, bf16 4096", input_launch(typical, typical.x), loads=4, stores=1),
        Specimen("layer norm, weights alone, bf16 4096", weight_launch(typical, parts), loads=2, stores=2),
        Specimen("layer norm, dx alone, bf16 16384", input_launch(long, long.x), loads=4, stores=1),
        Specimen("layer norm, weights alone, bf16 16384", weight_launch(long, meta(2, 256, 16384)), 2, 2),
        Specimen("layer norm, sum of parts, 4096", add_parts_launch(parts, [weight, weight]), loads=1, stores=0),
    ]


def _operands(width: int, center: bool, beside: bool) -> Operands:
    x, statistic = meta(8192, width, dtype=torch.bfloat16), meta(8192, 1)
    return Operands(x, x, statistic if center else None, statistic, meta(width), x if beside else None)


def _whole(width: int, center: bool, beside: bool) -> Specimen:
    operands = _operands(width, center, beside)
    launch = whole_launch(operands, operands.x, meta(1 + center, 256, width))
    name = f"{'layer' if center else 'rms'} norm, backward, bf16 {width}"
    if width % 16:
        return Specimen(name, launch, loads=0, stores=0)
    return Specimen(name, launch, loads=3 + beside, stores=2 + center)
