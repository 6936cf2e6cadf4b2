"""Specimens: launches at real sizes, to be compiled ahead of time so that their machine code can be looked at.

Every module of kernels has a function `specimens()` that returns some for each of its kernels. Their tensors are on
the meta device, so they may be as large as in training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch

_ALIGNMENT = 16
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Specimen:
    """A launch and what its machine code must have.

    loads, stores: how many tensors are read and written by 128-bit instructions. Gathers, masks, statistics and
    whatever else is short do not count.
    """

    name: str
    launch: Launch
    loads: int
    stores: int

    def signature(self) -> dict[str, str]:
        """Argument name -> Triton type, `constexpr` for constants, as the just-in-time compiler has them."""
        types = {name: _type(value) for name, value in self.launch.arguments.items()}
        return {name: types.get(name, "constexpr") for name in self._names()}

    def constants(self) -> dict[str, Any]:
        """Values of all that the compiler takes as a constant: constants, absent tensors, and arguments that are 1."""
        signature = self.signature()
        values = {**self.launch.arguments, **self.launch.constants}
        return {name: values[name] for name, kind in signature.items() if kind == "constexpr"}

    def divisible(self) -> list[int]:
        """Positions of arguments that the compiler may take for multiples of 16: aligned tensors, and such sizes."""
        arguments = self.launch.arguments
        return [index for index, name in enumerate(self._names()) if _divisible(arguments.get(name))]

    def _names(self) -> list[str]:
        return list(self.launch.kernel.arg_names)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory, for the launch of a specimen."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _divisible(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.storage_offset() * value.itemsize % _ALIGNMENT == 0
    return type(value) is int and value != 1 and value % _ALIGNMENT == 0
