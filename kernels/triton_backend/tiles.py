"""Parts of elementwise kernels: tiles of tensors seen as [rows, width], and the random words of dropout."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two
from megapipe.random.bits import CHANNEL, keep_threshold

_BYTES = 8192
"""Bytes of one tensor in a tile: two 16-byte accesses for each of 256 threads, so that enough loads are in flight."""

NUM_WARPS = 8


class Tile(NamedTuple):
    """The numbers of rows and columns that one program processes, both powers of two."""

    rows: int
    columns: int

    def grid(self, num_rows: int, width: int) -> tuple[int]:
        """Return the number of programs for a tensor of this shape. Tiles are in row-major order (see
        `tile_indices`)."""
        return (ceiling_division(num_rows, self.rows) * ceiling_division(width, self.columns),)


def tile_of(width: int, dtype: torch.dtype) -> Tile:
    """Return the tile for rows of `width` elements."""
    elements = _BYTES // dtype.itemsize
    columns = min(power_of_two(width), elements)
    return Tile(elements // columns, columns)


def over_tiles(kernel: Any, tensors: tuple[Any, ...], like: Tensor, *numbers: float, **constants: int) -> Launch:
    """Return a launch over the tiles of `like` [..., width].

    The kernel takes the tensors, num_rows, width, the numbers, the constants, ROWS and COLUMNS.
    """
    width = like.shape[-1]
    num_rows, tile = like.numel() // max(width, 1), tile_of(max(width, 1), like.dtype)
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
    return Launch(kernel, tile.grid(num_rows, width), (*tensors, num_rows, width, *numbers), constants, NUM_WARPS)


@triton.jit
def tile_indices(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return row numbers (int64) and column numbers (int32) of this program's tile."""
    across = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@triton.jit
def product(x, y):
    """Return x * y, rounded before it is added to anything, as sums over lanes need it.

    If every lane has one term, the compiler would otherwise fuse a lane's product with its addition to the neighbor's
    product. The lanes' sums would then differ in the last bit, and the hardware decides which of them is stored.
    """
    return tl.fma(x, y, tl.zeros_like(x))


_FIRST, _SECOND, _CHANNEL, _TOP = (tl.constexpr(word) for word in (0x85EBCA6B, 0xC2B2AE35, CHANNEL, 1 << 31))


def signed_threshold(probability: float) -> int:
    """Return the smallest random word of a kept element with its top bit flipped, as an int32: unsigned words keep
    their order if their top bits are flipped and they are compared as signed words."""
    return keep_threshold(probability) - (1 << 31)


@triton.jit
def finalize(word):
    """Apply `megapipe.random.bits.finalize` to uint32 words."""
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 13)) * _SECOND
    return word ^ (word >> 16)


@triton.jit
def kept(keys, channels, threshold):
    """Return whether elements are kept. keys (of tokens) and channels, both int32, broadcast. threshold: result of
    `signed_threshold`."""
    words = finalize(keys.to(tl.uint32, bitcast=True) ^ (channels.to(tl.uint32, bitcast=True) * _CHANNEL))
    return (words ^ _TOP).to(tl.int32, bitcast=True) >= threshold
