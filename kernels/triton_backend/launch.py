"""How kernels are launched. A launch is data, so that what is compiled ahead of time is what a GPU would run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel: products and sums fuse into one instruction, whatever Triton's default."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    kernel: decorated with `triton.jit`. grid: programs along each axis. arguments: by name, tensors and numbers that
    may differ from launch to launch. constants: by name, what the kernel is compiled for. num_warps: of a program.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int

    def run(self) -> None:
        """Launch on the device of the arguments, on its current stream. A grid without programs does nothing."""
        if 0 in self.grid:
            return
        device = next(value.device for value in self.arguments.values() if isinstance(value, Tensor))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.num_warps, **OPTIONS)


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """The rule of kernels that take every width of the usual dtypes."""
    if dtype not in _DTYPES:
        return f"takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return "the last axis is empty" if width == 0 else None


def stays_on_chip(width: int, longest: int, longest_unaligned: int) -> bool:
    """Whether a program holds a row in registers: up to `longest` elements of rows that are read 16 bytes at a time.

    Triton does so where the width is a multiple of 16. Single elements take registers for each address, and rows above
    `longest_unaligned` of them would spill.
    """
    return width <= (longest if width % 16 == 0 else longest_unaligned)


def ceiling_division(number: int, divisor: int) -> int:
    """The least number of groups of `divisor` that hold `number`."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
