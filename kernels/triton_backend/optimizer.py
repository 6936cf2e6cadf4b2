"""Ops on flat buffers in Triton: AdamW, the squared norm of a gradient summed in float64, and stochastic rounding to
bf16.

They have the functions and arguments of the references, and stochastic rounding has their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.optimizer import (
    BLOCK,
    Buffers,
    Coefficients,
    Elements,
    adamw_operator,
    check_rounded,
)
from megapipe.kernels.registry import opaque, refused_dtype, refused_master
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division
from megapipe.kernels.triton_backend.tiles import finalize
from megapipe.random.bits import CHANNEL, TOKEN

_ADAMW_BLOCK = 1024
_ADAMW_NUM_WARPS = 4


@triton.jit
def _adamw_step_kernel(
    master,
    gradient,
    first,
    second,
    parameter,
    gradient_scale,
    skip,
    count,
    decay,
    beta2,
    take_first,
    take_second,
    step_size,
    root_correction,
    epsilon,
    BLOCK: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - the compiler evaluates the outer condition, the GPU the inner one
        if tl.load(skip) != 0.0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    change = tl.load(gradient + offsets, mask=mask, other=0.0)
    if gradient_scale is not None:
        change = change * tl.load(gradient_scale)
    old_first = tl.load(first + offsets, mask=mask, other=0.0).to(tl.float32)
    old_second = tl.load(second + offsets, mask=mask, other=0.0).to(tl.float32)
    new_first = tl.fma(change - old_first, take_first, old_first)
    new_second = tl.fma(take_second * change, change, old_second * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(new_second), root_correction) + epsilon
    weight = tl.load(master + offsets, mask=mask, other=0.0) * decay
    weight = weight + tl.div_rn(-step_size * new_first, denominator)
    tl.store(master + offsets, weight, mask=mask)
    tl.store(first + offsets, new_first.to(first.dtype.element_ty), mask=mask)
    tl.store(second + offsets, new_second.to(second.dtype.element_ty), mask=mask)
    if parameter is not None:
        tl.store(parameter + offsets, weight.to(parameter.dtype.element_ty), mask=mask)


def _adamw_launch(buffers: Buffers, coefficients: Coefficients) -> Launch:
    count = buffers.master.numel()
    values = (*buffers, count, *coefficients.of_kernels())
    grid = (ceiling_division(count, _ADAMW_BLOCK),)
    return Launch(_adamw_step_kernel, grid, values, {"BLOCK": _ADAMW_BLOCK}, _ADAMW_NUM_WARPS)


adamw_step = adamw_operator(lambda buffers, coefficients: _adamw_launch(buffers, coefficients).run())


_PIECE = 4096
_GRADIENT_NORM_NUM_WARPS = 8


@triton.jit
def _block_sums_kernel(values, sums, count, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Sum of squares of one block per program. In fp64 the square of an fp32 number cannot overflow, and the order of
    the sum hardly matters."""
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros((PIECE,), dtype=tl.float64)
    for start in range(0, BLOCK, PIECE):
        offsets = block * BLOCK + start + tl.arange(0, PIECE)
        value = tl.load(values + offsets, mask=offsets < count, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
    tl.store(sums + block, tl.sum(total, axis=0))


def _gradient_norm_launch(values: Tensor, sums: Tensor) -> Launch:
    arguments, constants = (values, sums, values.numel()), {"BLOCK": BLOCK, "PIECE": _PIECE}
    return Launch(_block_sums_kernel, (sums.numel(),), arguments, constants, _GRADIENT_NORM_NUM_WARPS)


@opaque(
    "gradient_norm_triton(Tensor values) -> Tensor",
    lambda values: values.new_empty((), dtype=torch.float64),
)
def gradient_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor in float64: 0-dim, and finite if and only if every element is."""
    values = values.contiguous()
    sums = values.new_empty(ceiling_division(values.numel(), BLOCK), dtype=torch.float64)
    _gradient_norm_launch(values, sums).run()
    return sums.sum()


_ROUNDING_BLOCK = 1024
_ROUNDING_NUM_WARPS = 4
_CHANNEL, _TOKEN = tl.constexpr(CHANNEL), tl.constexpr(TOKEN)
_DISCARDED, _INFINITY, _MAGNITUDE, _QUIET = (tl.constexpr(bits) for bits in (0xFFFF, 0x7F800000, 0x7FFFFFFF, 0x40))


@triton.jit
def _stochastic_rounding_kernel(target, source, key, first, run, stride, skipped, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    place = offsets + skipped
    index = place // run * stride + place % run + first
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    word = finalize(finalize(low * _CHANNEL ^ tl.full((BLOCK,), key, tl.uint32)) ^ high * _TOKEN)
    value = tl.load(source + offsets, mask=mask, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    raised = tl.where(magnitude < _INFINITY, bits + (word & _DISCARDED), bits) >> 16
    # The upper half of a NaN might be an infinity.
    rounded = tl.where(magnitude > _INFINITY, raised | _QUIET, raised)
    tl.store(target + offsets, rounded.to(tl.int16), mask=mask)


def refused_source(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why numbers of this dtype cannot be rounded; a backend is chosen for the source, which is fp32."""
    return refused_dtype(dtype, torch.float32, of="source")


def stochastic_rounding(target: Tensor, source: Tensor, key: int, elements: Elements) -> None:
    """Overwrite target (bf16) with source (fp32), each element rounded at random, as the reference does."""
    check_rounded(target, source)
    _stochastic_rounding_launch(target, source, key, elements).run()


def _stochastic_rounding_launch(target: Tensor, source: Tensor, key: int, elements: Elements) -> Launch:
    count = source.numel()
    place = elements.first, elements.run, elements.stride, elements.skipped
    values = (target.view(torch.int16), source, key, *place, count)
    grid, constants = (ceiling_division(count, _ROUNDING_BLOCK),), {"BLOCK": _ROUNDING_BLOCK}
    return Launch(_stochastic_rounding_kernel, grid, values, constants, _ROUNDING_NUM_WARPS)


REFUSALS = {"adamw": refused_master, "stochastic_rounding": refused_source}
