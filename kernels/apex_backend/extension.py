"""apex's compiled module, and the tensors that it takes."""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from megapipe.kernels.apex_backend import EXTENSION

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def extension() -> ModuleType:
    """The module. Raises ImportError."""
    return importlib.import_module(EXTENSION)


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """The rule of apex's norms."""
    if dtype not in _DTYPES:
        return f"takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return "the last axis is empty" if width == 0 else None


def statistic_of(x: Tensor) -> Tensor:
    """Memory for one fp32 number per row of x, [..., 1]; apex gives them flat."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def contiguous_like(x: Tensor) -> Tensor:
    """Contiguous memory in x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
