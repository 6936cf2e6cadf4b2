"""SwiGLU in Triton: the function of `megapipe.kernels.reference.swiglu`, rounded once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, num_rows_of, tile_indices, tile_of


@triton.jit
def _forward_kernel(gate_up, y, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile_indices(width, ROWS, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    source = gate_up + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy, gate_up, dgate_up, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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


def _launch(kernel: Any, tensors: dict[str, Tensor], gate_up: Tensor) -> Launch:
    width, num_rows = gate_up.shape[-1] // 2, num_rows_of(gate_up)
    tile = tile_of(width, gate_up.dtype)
    arguments = {**tensors, "num_rows": num_rows, "width": width}
    return Launch(kernel, tile.grid(num_rows, width), arguments, tile.constants(), NUM_WARPS)


def _forward_launch(gate_up: Tensor, y: Tensor) -> Launch:
    return _launch(_forward_kernel, {"gate_up": gate_up, "y": y}, gate_up)


def _backward_launch(dy: Tensor, gate_up: Tensor, dgate_up: Tensor) -> Launch:
    return _launch(_backward_kernel, {"dy": dy, "gate_up": gate_up, "dgate_up": dgate_up}, gate_up)


@opaque(
    "swiglu_input_gradient_triton(Tensor dy, Tensor gate_up) -> Tensor",
    lambda dy, gate_up: gate_up.new_empty(gate_up.shape),
)
def _input_gradient(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    dgate_up = torch.empty_like(gate_up)
    _backward_launch(dy.contiguous(), gate_up, dgate_up).run()
    return dgate_up


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _input_gradient(dy, *ctx.saved_tensors)


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@opaque("swiglu_triton(Tensor gate_up) -> Tensor", _fake, _setup_context, _backward)
def apply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]. Saves its input alone."""
    gate_up, y = gate_up.contiguous(), _fake(gate_up)
    _forward_launch(gate_up, y).run()
    return y


def specimens() -> list[Specimen]:
    """Rows of a small and a large model."""
    small, large = meta(8192, 2 * 2816), meta(8192, 2 * 14336, dtype=torch.bfloat16)
    small_y, large_y = _fake(small), _fake(large)
    return [
        Specimen("swiglu fp32 2816", _forward_launch(small, small_y), loads=2, stores=1),
        Specimen("swiglu bf16 14336", _forward_launch(large, large_y), loads=2, stores=1),
        Specimen("swiglu backward fp32 2816", _backward_launch(small_y, small, small), loads=3, stores=2),
        Specimen("swiglu backward bf16 14336", _backward_launch(large_y, large, large), loads=3, stores=2),
    ]
