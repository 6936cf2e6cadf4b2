"""A linear layer's weight gradient, added to an fp32 accumulator by apex: the function of the reference module.

cuBLAS adds the product to the accumulator in fp32. It is never rounded to bf16 or fp16, nor in memory.
"""

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import WEIGHT_GRADIENT, why_unsupported

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take inputs of this dtype."""
    if dtype not in _DTYPES:
        return f"takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return why_unsupported([WEIGHT_GRADIENT])


def accumulate(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """Add the weight gradient to total [out, in] fp32, for input x [..., in] and output gradient dy [..., out].

    Raises ValueError for operands that apex would misread: it checks neither dtypes nor shapes.
    """
    rows, outputs = x.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous()
    fits = len(rows) == len(outputs) and total.shape == (outputs.shape[1], rows.shape[1]) and len(rows) < _MOST
    if not fits or x.dtype != dy.dtype or total.dtype != torch.float32 or not total.is_contiguous():
        raise ValueError(
            f"weight_gradient: x is {x.dtype} {list(x.shape)}, dy {dy.dtype} {list(dy.shape)}, total {total.dtype} "
            f"{list(total.shape)}; apex needs x and dy of one dtype with the same rows, and a contiguous float32 "
            "total"
        )
    if len(rows):
        WEIGHT_GRADIENT(rows, outputs, total)
