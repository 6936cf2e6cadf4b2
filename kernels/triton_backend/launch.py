"""Launches of kernels. A launch is data, so that the kernels compiled ahead of time are those that a GPU would run.
`tests/kernels/specimens.py` has launches of every kernel at real sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel: products and sums fuse into one instruction, whatever Triton's default."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    kernel: decorated with `triton.jit`. grid: programs along each axis. values: the kernel's first arguments in order,
    tensors and numbers that may differ from launch to launch. constants: by name, what the kernel is compiled for.
    num_warps: of a program.
    """

    kernel: Any
    grid: tuple[int, ...]
    values: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int

    def run(self) -> None:
        """Launch on the device of the arguments, on its current stream. A grid without programs does nothing."""
        if 0 in self.grid:
            return
        device = next(value.device for value in self.values if isinstance(value, Tensor))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        self.kernel[self.grid](*self.values, **self.constants, num_warps=self.num_warps, **OPTIONS)


def stays_on_chip(width: int, longest: int, longest_unaligned: int) -> bool:
    """Return whether a program holds a row in registers: up to `longest` elements that are read 16 bytes at a time.

    Triton reads 16 bytes at a time if the width is a multiple of 16. Otherwise each element needs registers for its
    address, and rows longer than `longest_unaligned` would spill.
    """
    return width <= (longest if width % 16 == 0 else longest_unaligned)


RESIDENT, RESIDENT_UNALIGNED = 16384, 8192
"""Elements of the longest rows that norms and softmax keep in registers."""
_TILE, _CHUNK, ELEMENTS_PER_WARP = 4096, 4096, 512


def over_rows(resident: Any, chunked: Any, x: Tensor, values: tuple[Any, ...], constants: Mapping[str, int]) -> Launch:
    """Return a launch over the rows of x: several whole rows per program in registers, or one row in chunks.

    resident, chunked: the kernels of both forms. The first one also takes num_rows after the values, and the constant
    ROWS.
    """
    width, num_rows = x.shape[-1], x.shape[:-1].numel()
    if not stays_on_chip(width, RESIDENT, RESIDENT_UNALIGNED):
        return Launch(chunked, (num_rows,), values, {**constants, "BLOCK": _CHUNK}, _CHUNK // ELEMENTS_PER_WARP)
    block = power_of_two(max(width, 1))
    rows = max(1, _TILE // block)
    return Launch(
        resident,
        (ceiling_division(num_rows, rows),),
        (*values, num_rows),
        {**constants, "ROWS": rows, "BLOCK": block},
        rows * block // ELEMENTS_PER_WARP,
    )


def ceiling_division(number: int, divisor: int) -> int:
    """Return the smallest number of groups of `divisor` that hold `number`."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
