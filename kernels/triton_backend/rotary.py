"""Rotary position embedding in Triton: the function of `megapipe.kernels.reference.rotary`.

A row is one head of one token. Rows are read where they lie, so that a view into a joint query, key and value tensor
is not copied first; the result is contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two
from megapipe.kernels.triton_backend.launch import refusal as any_width
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, tile_of


@triton.jit
def _rotate(first, second, cosine, sine, FORWARD: tl.constexpr):
    if FORWARD:
        return first * cosine - second * sine, second * cosine + first * sine
    return first * cosine + second * sine, second * cosine - first * sine


@triton.jit
def _kernel(
    x,
    cosine,
    sine,
    y,
    num_rows,
    num_tokens,
    num_heads,
    batch_stride,
    token_stride,
    head_stride,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // num_heads
    position = token % num_tokens
    source = (token // num_tokens).to(tl.int64) * batch_stride + position.to(tl.int64) * token_stride
    source += (row % num_heads).to(tl.int64) * head_stride
    goal = row.to(tl.int64) * (2 * PAIRS)
    inside = (row < num_rows)[:, None]
    pair = tl.arange(0, BLOCK)
    mask = inside & (pair < PAIRS)[None, :]
    angle = position[:, None] * PAIRS + pair[None, :]
    cosines = tl.load(cosine + angle, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(sine + angle, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK)[None, :]
        both = inside & (channel < 2 * PAIRS)
        value = tl.load(x + source[:, None] + channel, mask=both, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(value, (ROWS, BLOCK, 2)))
        first, second = _rotate(first, second, cosines, sines, FORWARD)
        result = tl.reshape(tl.join(first, second), (ROWS, 2 * BLOCK))
        tl.store(y + goal[:, None] + channel, result.to(y.dtype.element_ty), mask=both)
    else:
        start = x + source[:, None] + pair[None, :]
        first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(start + PAIRS, mask=mask, other=0.0).to(tl.float32)
        first, second = _rotate(first, second, cosines, sines, FORWARD)
        end = y + goal[:, None] + pair[None, :]
        tl.store(end, first.to(y.dtype.element_ty), mask=mask)
        tl.store(end + PAIRS, second.to(y.dtype.element_ty), mask=mask)


def _launch(x: Tensor, cosine: Tensor, sine: Tensor, y: Tensor, interleaved: bool, forward: bool) -> Launch:
    _, num_tokens, num_heads, width = x.shape
    num_rows = x.numel() // width
    block = power_of_two(width // 2)
    rows = tile_of(2 * block, x.dtype).rows
    arguments = {
        "x": x,
        "cosine": cosine,
        "sine": sine,
        "y": y,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "batch_stride": x.stride(0),
        "token_stride": x.stride(1),
        "head_stride": x.stride(2),
    }
    constants = {"PAIRS": width // 2, "INTERLEAVED": interleaved, "FORWARD": forward, "ROWS": rows, "BLOCK": block}
    return Launch(_kernel, (ceiling_division(num_rows, rows),), arguments, constants, NUM_WARPS)


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """What does not fit the kernel, in words."""
    return any_width(device, dtype, width) or (f"a head of {width} channels has no pairs" if width % 2 else None)


def _fake(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, forward: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cosine, sine, ctx.interleaved, ctx.forward = inputs
    ctx.save_for_backward(cosine, sine)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    cosine, sine = ctx.saved_tensors
    return rotated(gradient, cosine, sine, ctx.interleaved, not ctx.forward), None, None, None, None


@opaque(
    "rotary_triton(Tensor x, Tensor cosine, Tensor sine, bool interleaved, bool forward) -> Tensor",
    _fake,
    _setup_context,
    _backward,
)
def rotated(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, forward: bool) -> Tensor:
    """x [b, s, heads, d] with its pairs rotated by the angles, or back by them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = _fake(x, cosine, sine, interleaved, forward)
    _launch(x, cosine.contiguous(), sine.contiguous(), y, interleaved, forward).run()
    return y


def apply(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate channel pairs of x [b, s, heads, d] by the angles of cosine and sine [s, d/2].

    Pair i is channels i and i + d/2 (Llama, GPT-NeoX), or 2i and 2i + 1 where interleaved (the paper, GPT-J).
    """
    return rotated(x, cosine, sine, interleaved, True)


def specimens() -> list[Specimen]:
    """Queries of usual widths as views of a joint tensor, read beside two tables of angles."""
    return [
        _specimen(128, torch.bfloat16, interleaved=False, forward=True),
        _specimen(128, torch.bfloat16, interleaved=True, forward=False),
        _specimen(80, torch.bfloat16, interleaved=False, forward=False),
        _specimen(64, torch.float32, interleaved=True, forward=True),
    ]


def _specimen(width: int, dtype: torch.dtype, *, interleaved: bool, forward: bool) -> Specimen:
    joint, y = meta(2, 4096, 48, width, dtype=dtype), meta(2, 4096, 32, width, dtype=dtype)
    angles = meta(4096, width // 2)
    launch = _launch(joint[:, :, :32], angles, angles, y, interleaved, forward)
    name = f"rotary {'interleaved' if interleaved else 'half'} {dtype} {width}"
    return Specimen(name, launch, loads=3 if interleaved else 4, stores=1 if interleaved else 2)
