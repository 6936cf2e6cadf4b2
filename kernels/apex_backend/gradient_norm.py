"""Squared norm of a flat gradient by apex's multi-tensor norm: the function of the reference module.

Every block of 65,536 elements is a tensor of apex's list, so that the sum has the canonical blocks. The host prepares
the list, about a microsecond for each block.
"""

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import L2_NORM, why_unsupported
from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.gradient_norm import BLOCK

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take gradients of this dtype."""
    if dtype not in _DTYPES:
        return f"takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return why_unsupported([L2_NORM])


@opaque(
    "gradient_norm_apex(Tensor values) -> Tensor",
    lambda values: values.new_empty((), dtype=torch.float64),
)
def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, block by block: a 0-dim float64 tensor on its device.

    It is finite only if every element is; elements beyond 1e17 may overflow too, as a block's norm is taken in fp32.
    """
    if not values.numel():
        return values.new_zeros((), dtype=torch.float64)
    blocks = list(values.contiguous().split(BLOCK))
    _, norms = L2_NORM(BLOCK, values.new_zeros(1, dtype=torch.int32), [blocks], True)
    total: Tensor = norms.double().square().sum()
    return total
