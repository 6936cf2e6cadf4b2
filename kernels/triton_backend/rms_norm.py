"""Root-mean-square normalisation in Triton: the functions of `megapipe.kernels.reference.rms_norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta


@triton.jit
def _helper(x, width):
    return tl.sum(x * x, axis=1) / width


@triton.jit
def _forward_kernel(x, weight, y, rstd, num_rows, width, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(_helper(value, width) + epsilon)
    tl.store(rstd + row, scale, mask=row < num_rows)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + offset, (value * scale[:, None] * factor[None, :]).to(y.dtype.element_ty), mask=mask)


def _forward(x: Tensor, weight: Tensor, y: Tensor, rstd: Tensor, epsilon: float) -> Launch:
    width = x.shape[-1]
    num_rows = x.numel() // width
    block = power_of_two(width)
    rows = max(1, 4096 // block)
    arguments = {
        "x": x,
        "weight": weight,
        "y": y,
        "rstd": rstd,
        "num_rows": num_rows,
        "width": width,
        "epsilon": epsilon,
    }
    return Launch(
        _forward_kernel,
        (ceiling_division(num_rows, rows),),
        arguments,
        {"ROWS": rows, "BLOCK": block},
        max(8, block // 512),
    )


def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    x = x.contiguous()
    y, rstd = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    _forward(x, weight.contiguous(), y, rstd, epsilon).run()
    return y, rstd


def specimens() -> list[Specimen]:
    """Small, typical and large rows."""
    found = []
    for width in (768, 4096, 16384):
        x, weight, rstd = meta(4096, width, dtype=torch.bfloat16), meta(width), meta(4096, 1)
        found.append(Specimen(f"forward bf16 {width}", _forward(x, weight, x, rstd, 1e-5), loads=2, stores=1))
    return found
