"""Tiles of elementwise kernels on tensors seen as [rows, width]."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.triton_backend.launch import ceiling_division, power_of_two

_BYTES = 8192
"""Of one tensor in a tile: two 16-byte accesses for each of 256 threads, so that enough loads are under way."""

NUM_WARPS = 8


@dataclass(frozen=True)
class Tile:
    """The rows and columns that one program takes, both powers of two."""

    rows: int
    columns: int

    def grid(self, num_rows: int, width: int) -> tuple[int]:
        """Programs for a tensor of this shape, tiles of one row first: `tile_indices` reads it."""
        return (ceiling_division(num_rows, self.rows) * ceiling_division(width, self.columns),)

    def constants(self) -> dict[str, int]:
        """What kernels call it."""
        return {"ROWS": self.rows, "COLUMNS": self.columns}


def tile_of(width: int, dtype: torch.dtype) -> Tile:
    """The tile for rows of `width` elements."""
    elements = _BYTES // dtype.itemsize
    columns = min(power_of_two(width), elements)
    return Tile(elements // columns, columns)


def num_rows_of(x: Tensor) -> int:
    """The product of all axes but the last."""
    return x.numel() // x.shape[-1]


@triton.jit
def tile_indices(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row numbers (int64) and column numbers (int32) of this program's tile."""
    across = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@triton.jit
def product(x, y):
    """x * y, rounded by itself, as a sum over lanes needs it.

    Where a lane has one term, the compiler would fuse its own product with the sum of its own and its neighbor's: the
    lanes' sums differ in the last bit, and which of them is stored is left to the hardware.
    """
    return tl.fma(x, y, tl.zeros_like(x))
