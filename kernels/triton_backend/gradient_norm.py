"""Squared norm of a flat gradient in Triton, summed in float64: the function of the reference module."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.gradient_norm import BLOCK
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta

_PIECE = 4096
_NUM_WARPS = 8


@triton.jit
def _block_sums_kernel(values, sums, count, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """One program a block. In fp64 the square of an fp32 number cannot overflow, and the order hardly matters."""
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros((PIECE,), dtype=tl.float64)
    for start in range(0, BLOCK, PIECE):
        offsets = block * BLOCK + start + tl.arange(0, PIECE)
        value = tl.load(values + offsets, mask=offsets < count, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
    tl.store(sums + block, tl.sum(total, axis=0))


def _launch(values: Tensor, sums: Tensor) -> Launch:
    arguments = {"values": values, "sums": sums, "count": values.numel()}
    return Launch(_block_sums_kernel, (sums.numel(),), arguments, {"BLOCK": BLOCK, "PIECE": _PIECE}, _NUM_WARPS)


@opaque(
    "gradient_norm_triton(Tensor values) -> Tensor",
    lambda values: values.new_empty((), dtype=torch.float64),
)
def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor in float64: 0-dim, and finite if and only if every element is."""
    values = values.contiguous()
    sums = values.new_empty(ceiling_division(values.numel(), BLOCK), dtype=torch.float64)
    _launch(values, sums).run()
    return sums.sum()


def specimens() -> list[Specimen]:
    """Gradients of a large layer, in the accumulation dtype and in bf16."""
    sums = meta(1 << 10, dtype=torch.float64)
    launches = {dtype: _launch(meta(1 << 26, dtype=dtype), sums) for dtype in (torch.float32, torch.bfloat16)}
    return [Specimen(f"squared norm {dtype}", launch, loads=1, stores=0) for dtype, launch in launches.items()]
