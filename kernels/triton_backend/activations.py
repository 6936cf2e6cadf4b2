"""Activations in Triton: the functions of `megapipe.kernels.reference.activations`, rounded once."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.registry import opaque
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.kernels.triton_backend.tiles import over_tiles, tile_indices

_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_LINEAR = tl.constexpr(2 * 0.7978845608028654)
_CUBIC = tl.constexpr(2 * 0.7978845608028654 * 0.044715)


@triton.jit
def _argument(x, bias, row, column, num_rows, width):
    """Return (x + bias in fp32, offsets, mask) of a tile."""
    offset = row[:, None] * width + column[None, :]
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return value, offset, mask


@triton.jit
def _tanh_parts(value):
    """Return the logistic function of z = 2u, which is (1 + tanh u) / 2, and its derivative, without overflow or
    cancellation."""
    z = value * (value * value * _CUBIC + _LINEAR)
    small = tl.exp(-tl.abs(z))
    below = 1.0 / (1.0 + small)
    return tl.where(z >= 0.0, below, small * below), small * below * below


@triton.jit
def _gelu_forward_kernel(x, bias, y, num_rows, width, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    value, offset, mask = _argument(x, bias, row, column, num_rows, width)
    if TANH:
        share, _ = _tanh_parts(value)
    else:
        share = tl.erf(value * _ROOT_HALF) * 0.5 + 0.5
    tl.store(y + offset, (value * share).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    dy, x, bias, dx, num_rows, width, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
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


def _gelu_forward_launch(x: Tensor, bias: Tensor | None, y: Tensor, approximate: str) -> Launch:
    return over_tiles(_gelu_forward_kernel, (x, bias, y), x, TANH=approximate == "tanh")


def _gelu_backward_launch(dy: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, approximate: str) -> Launch:
    return over_tiles(_gelu_backward_kernel, (dy, x, bias, dx), x, TANH=approximate == "tanh")


@opaque(
    "gelu_input_gradient_triton(Tensor dy, Tensor x, Tensor? bias, str approximate) -> Tensor",
    lambda dy, x, bias, approximate: x.new_empty(x.shape),
)
def gelu_input_gradient(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return the gradient of x, in its shape, for the gradient dy of the result."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _gelu_backward_launch(dy, x, None if bias is None else bias.contiguous(), dx, approximate).run()
    return dx


def _gelu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _gelu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx = gelu_input_gradient(dy, x, bias, ctx.approximate)
    dbias = dx.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype) if ctx.needs_input_grad[1] else None
    return dx, dbias, None


@opaque(
    "gelu_triton(Tensor x, Tensor? bias, str approximate) -> Tensor",
    lambda x, bias, approximate: x.new_empty(x.shape),
    _gelu_setup_context,
    _gelu_backward,
)
def gelu_with_bias(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return the GELU of x [..., f] plus bias [f], in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _gelu_forward_launch(x, None if bias is None else bias.contiguous(), y, approximate).run()
    return y


def gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Return x times the normal distribution function of x, element by element; `tanh` is GPT-2's approximation."""
    return gelu_with_bias(x, None, approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Return the GELU of x [..., f] plus bias [f], in x's dtype, rounded once."""
    return gelu_with_bias(x, bias, approximate)


@triton.jit
def _swiglu_forward_kernel(gate_up, y, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    source = gate_up + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy, gate_up, dgate_up, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    offset = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(gate_up + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + offset + width, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    dgate = gradient * up * share * (1.0 + gate * (1.0 - share))
    tl.store(dgate_up + offset, dgate.to(dgate_up.dtype.element_ty), mask=mask)
    tl.store(dgate_up + offset + width, (gradient * gate * share).to(dgate_up.dtype.element_ty), mask=mask)


def _swiglu_forward_launch(gate_up: Tensor, y: Tensor) -> Launch:
    return over_tiles(_swiglu_forward_kernel, (gate_up, y), y)


def _swiglu_backward_launch(dy: Tensor, gate_up: Tensor, dgate_up: Tensor) -> Launch:
    return over_tiles(_swiglu_backward_kernel, (dy, gate_up, dgate_up), dy)


@opaque(
    "swiglu_input_gradient_triton(Tensor dy, Tensor gate_up) -> Tensor",
    lambda dy, gate_up: gate_up.new_empty(gate_up.shape),
)
def _swiglu_input_gradient(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    dgate_up = torch.empty_like(gate_up)
    _swiglu_backward_launch(dy.contiguous(), gate_up, dgate_up).run()
    return dgate_up


def _swiglu_setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, dy: Tensor) -> Tensor:
    return _swiglu_input_gradient(dy, *ctx.saved_tensors)


def _swiglu_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@opaque("swiglu_triton(Tensor gate_up) -> Tensor", _swiglu_fake, _swiglu_setup_context, _swiglu_backward)
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]. Saves only its input."""
    gate_up, y = gate_up.contiguous(), _swiglu_fake(gate_up)
    _swiglu_forward_launch(gate_up, y).run()
    return y
