"""The arguments of a launch, as Triton's just-in-time compiler sees them."""

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


def arguments(launch: Launch) -> dict[str, Any]:
    """Return the values by name."""
    return dict(zip(launch.kernel.arg_names, launch.values, strict=False))


def signature(launch: Launch) -> dict[str, str]:
    """Return argument name -> Triton type, `constexpr` for constants."""
    types = {name: _type(value) for name, value in arguments(launch).items()}
    return {name: types.get(name, "constexpr") for name in launch.kernel.arg_names}


def constants(launch: Launch) -> dict[str, Any]:
    """Return the values that the compiler knows: constants, absent tensors, and arguments that are 1."""
    values = {**arguments(launch), **launch.constants}
    return {name: values[name] for name, kind in signature(launch).items() if kind == "constexpr"}


def divisible(launch: Launch) -> list[int]:
    """Return the positions of arguments that are multiples of 16: aligned tensors, and such sizes."""
    values = arguments(launch)
    return [index for index, name in enumerate(launch.kernel.arg_names) if _divisible(values.get(name))]


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
