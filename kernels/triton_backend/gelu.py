"""GELU in Triton, with an optional bias added before: what `megapipe.kernels.reference.gelu` does.

In fp32 from load to store, so that the sum with the bias is not rounded on the way.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, num_rows_of, tile_indices, tile_of

_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_LINEAR = tl.constexpr(2 * 0.7978845608028654)
_CUBIC = tl.constexpr(2 * 0.7978845608028654 * 0.044715)


@triton.jit
def _argument(x, bias, row, column, num_rows, width):
    """(x + bias in fp32, offsets, mask) of a tile."""
    offset = row[:, None] * width + column[None, :]
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return value, offset, mask


@triton.jit
def _tanh_parts(value):
    """Logistic function of z = 2u, which is (1 + tanh u) / 2, and its derivative. Neither overflows nor cancels."""
    z = value * (value * value * _CUBIC + _LINEAR)
    small = tl.exp(-tl.abs(z))
    below = 1.0 / (1.0 + small)
    return tl.where(z >= 0.0, below, small * below), small * below * below


@triton.jit
def _forward_kernel(x, bias, y, num_rows, width, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    value, offset, mask = _argument(x, bias, row, column, num_rows, width)
    if TANH:
        share, _ = _tanh_parts(value)
    else:
        share = tl.erf(value * _ROOT_HALF) * 0.5 + 0.5
    tl.store(y + offset, (value * share).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy, x, bias, dx, num_rows, width, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    value, offset, mask = _argument(x, bias, row, column, num_rows, width)
    if TANH:
        share, slope = _tanh_parts(value)
        derivative = share + value * slope * (value * value * (3.0 * _CUBIC) + _LINEAR)
    else:
        density = tl.exp(-0.5 * value * value) * _DENSITY
        derivative = tl.erf(value * _ROOT_HALF) * 0.5 + 0.5 + value * density
    gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offset, (gradient * derivative).to(dx.dtype.element_ty), mask=mask)


def _launch(kernel: Any, tensors: dict[str, Tensor | None], like: Tensor, approximate: str) -> Launch:
    width, num_rows = like.shape[-1], num_rows_of(like)
    tile = tile_of(width, like.dtype)
    arguments = {**tensors, "num_rows": num_rows, "width": width}
    constants = {"TANH": approximate == "tanh", **tile.constants()}
    return Launch(kernel, tile.grid(num_rows, width), arguments, constants, NUM_WARPS)


def _forward_launch(x: Tensor, bias: Tensor | None, y: Tensor, approximate: str) -> Launch:
    return _launch(_forward_kernel, {"x": x, "bias": bias, "y": y}, x, approximate)


def _backward_launch(dy: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, approximate: str) -> Launch:
    return _launch(_backward_kernel, {"dy": dy, "x": x, "bias": bias, "dx": dx}, x, approximate)


@opaque(
    "gelu_input_gradient_triton(Tensor dy, Tensor x, Tensor? bias, str approximate) -> Tensor",
    lambda dy, x, bias, approximate: x.new_empty(x.shape),
)
def input_gradient(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Gradient of x, of its shape, for the gradient dy of the result."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _backward_launch(dy, x, None if bias is None else bias.contiguous(), dx, approximate).run()
    return dx


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx = input_gradient(dy, x, bias, ctx.approximate)
    dbias = dx.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype) if ctx.needs_input_grad[1] else None
    return dx, dbias, None


@opaque(
    "gelu_triton(Tensor x, Tensor? bias, str approximate) -> Tensor",
    lambda x, bias, approximate: x.new_empty(x.shape),
    _setup_context,
    _backward,
)
def with_bias(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """GELU of x [..., f] plus bias [f], in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _forward_launch(x, None if bias is None else bias.contiguous(), y, approximate).run()
    return y


def apply(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """x times the normal distribution function of x, element by element; `tanh` is GPT-2's approximation."""
    return with_bias(x, None, approximate)


def specimens() -> list[Specimen]:
    """Rows of a small and a large model."""
    small, large = meta(8192, 3072), meta(8192, 16384, dtype=torch.bfloat16)
    bias = meta(16384, dtype=torch.bfloat16)
    return [
        Specimen("gelu tanh fp32 3072", _forward_launch(small, None, small, "tanh"), loads=1, stores=1),
        Specimen("bias gelu erf bf16 16384", _forward_launch(large, bias, large, "none"), loads=2, stores=1),
        Specimen("gelu erf backward fp32", _backward_launch(small, small, None, small, "none"), loads=2, stores=1),
        Specimen("bias gelu tanh backward", _backward_launch(large, large, bias, large, "tanh"), loads=3, stores=1),
    ]
