"""Softmax of attention scores and rotary positions in Triton: the functions of `megapipe.kernels.reference.attention`.

Softmax is fp32 throughout, rounded once, for any number of keys. Hidden scores are not read. Rows of up to `RESIDENT`
keys (`RESIDENT_UNALIGNED` if they are not read 16 bytes at a time) are read once, by resident kernels, which keep rows
in registers; chunked kernels read longer rows twice.

A row of the rotary kernel is one head of one token. Rows are read in place, so that a view into a joint query, key
and value tensor is not copied first; the result is contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.attention import softmax_operators
from megapipe.kernels.registry import opaque
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import (
    Launch,
    ceiling_division,
    over_rows,
    power_of_two,
)
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, product, tile_of


@triton.jit
def resident_kernel(
    scores,
    mask,
    y,
    heads,
    queries,
    keys,
    mask_batch,
    mask_head,
    mask_query,
    window,
    scale,
    num_rows,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax of ROWS whole rows of scores [batch, heads, queries, keys], each scaled and masked first.

    CAUSAL: query i sees keys up to i + keys - queries; WINDOW: of those only the last `window`. MASK: `mask` is True
    if a key is seen, and mask_batch, mask_head and mask_query are its strides. A row that sees no key becomes 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (key < keys)[None, :]
    # Reads end at multiples of 16 keys: a bound within 16 bytes would split loads into single elements.
    seen, near = inside, inside
    query = row % queries
    if CAUSAL:
        last = query + (keys - queries)
        seen &= key[None, :] <= last[:, None]
        near &= key[None, :] < (last // 16 * 16 + 16)[:, None]
        if WINDOW:
            first = last - window + 1
            seen &= key[None, :] >= first[:, None]
            near &= key[None, :] >= (first // 16 * 16)[:, None]
    if MASK:
        head = row // queries
        line = head // heads * mask_batch + head % heads * mask_head + query * mask_query
        seen &= tl.load(mask + line[:, None] + key[None, :], mask=near, other=0) != 0
    offset = row[:, None] * keys + key[None, :]
    value = tl.load(scores + offset, mask=near, other=0.0).to(tl.float32) * scale
    value = tl.where(seen, value, float("-inf"))
    largest = tl.max(value, axis=1)
    # A row that sees nothing has the maximum minus infinity: its exponentials and their sum are then 0. NaNs stay NaN.
    value = tl.exp(value - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = tl.sum(value, axis=1)
    value *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def chunked_kernel(
    scores,
    mask,
    y,
    heads,
    queries,
    keys,
    mask_batch,
    mask_head,
    mask_query,
    window,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax of one row: first a running maximum and sum in every lane (Milakov and Gimelshein 2018, 1805.02867),
    then the results."""
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    # Keys from `first` up to `end` are seen, and read from one multiple of 16 to another.
    first, end = 0, keys
    if CAUSAL:
        end = query + (keys - queries) + 1
        if WINDOW:
            first = tl.maximum(end - window, 0)
    near_first, near_end = first // 16 * 16, (end + 15) // 16 * 16
    head = row // queries
    line = head // heads * mask_batch + head % heads * mask_head + query * mask_query
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = (key >= first) & (key < end)
        near = (key >= near_first) & (key < near_end) & (key < keys)
        if MASK:
            seen &= tl.load(mask + line + key, mask=near, other=0) != 0
        value = tl.load(scores + row * keys + key, mask=near, other=0.0).to(tl.float32) * scale
        value = tl.where(seen, value, float("-inf"))
        larger = tl.maximum(largest, value)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - safe) + tl.exp(value - safe)
        largest = larger
    top = tl.max(largest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(total * tl.exp(largest - top), axis=0)
    factor = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = (key >= first) & (key < end)
        near = (key >= near_first) & (key < near_end) & (key < keys)
        if MASK:
            seen &= tl.load(mask + line + key, mask=near, other=0) != 0
        value = tl.load(scores + row * keys + key, mask=near, other=0.0).to(tl.float32) * scale
        value = tl.exp(tl.where(seen, value, float("-inf")) - top) * factor
        tl.store(y + row * keys + key, value.to(y.dtype.element_ty), mask=key < keys)


@triton.jit
def resident_gradient_kernel(dy, y, dx, keys, scale, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of the scores of ROWS whole rows: y (dy - sum(y dy)) scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (key < keys)[None, :]
    offset = row[:, None] * keys + key[None, :]
    weight = tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
    common = tl.sum(product(weight, gradient), axis=1)
    result = weight * (gradient - common[:, None]) * scale
    tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def chunked_gradient_kernel(dy, y, dx, keys, scale, BLOCK: tl.constexpr):
    """Gradient of the scores of one row that is too long for registers: one pass for the sum, another for the
    result."""
    first = tl.program_id(0).to(tl.int64) * keys
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        weight = tl.load(y + first + key, mask=key < keys, other=0.0).to(tl.float32)
        gradient = tl.load(dy + first + key, mask=key < keys, other=0.0).to(tl.float32)
        sums = tl.fma(weight, gradient, sums)
    common = tl.sum(sums, axis=0)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        weight = tl.load(y + first + key, mask=key < keys, other=0.0).to(tl.float32)
        gradient = tl.load(dy + first + key, mask=key < keys, other=0.0).to(tl.float32)
        result = weight * (gradient - common) * scale
        tl.store(dx + first + key, result.to(dx.dtype.element_ty), mask=key < keys)


def softmax_launch(
    scores: Tensor, mask: Tensor | None, y: Tensor, scale: float, causal: bool, window: int | None
) -> Launch:
    """Return the launch that reads the contiguous scores and the mask, and writes y."""
    _, heads, queries, keys = scores.shape
    constants: dict[str, int] = {"CAUSAL": causal, "WINDOW": window is not None, "MASK": mask is not None}
    strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(scores.shape)
        if mask.stride(3) != 1 and keys > 1:
            mask = mask.contiguous()
        mask, strides = mask.view(torch.uint8), mask.stride()[:3]
    values = (scores, mask, y, heads, queries, keys, *strides, window or 0, scale)
    return over_rows(resident_kernel, chunked_kernel, scores, values, constants)


def softmax_gradient_launch(dy: Tensor, y: Tensor, dx: Tensor, scale: float) -> Launch:
    """Return the launch that reads dy and y, and writes dx, all contiguous."""
    return over_rows(resident_gradient_kernel, chunked_gradient_kernel, y, (dy, y, dx, y.shape[-1], scale), {})


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    scores = scores.contiguous()
    y = torch.empty_like(scores)
    softmax_launch(scores, mask, y, scale, causal, window).run()
    return y


def _softmax_input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    softmax_gradient_launch(dy, y, dx, scale).run()
    return dx


softmax, attention_probabilities = softmax_operators("triton", _softmax, _softmax_input_gradient)


@triton.jit
def _rotate(first, second, cosine, sine, FORWARD: tl.constexpr):
    if FORWARD:
        return first * cosine - second * sine, second * cosine + first * sine
    return first * cosine + second * sine, second * cosine - first * sine


@triton.jit
def _rotary_kernel(
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
    FORWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotation of ROWS heads of single tokens, by the angles of the token's position; backwards unless FORWARD."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // num_heads
    position = token % num_tokens
    source = (token // num_tokens).to(tl.int64) * batch_stride + position.to(tl.int64) * token_stride
    source += (row % num_heads).to(tl.int64) * head_stride
    goal = row.to(tl.int64) * (2 * PAIRS)
    pair = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (pair < PAIRS)[None, :]
    angle = position[:, None] * PAIRS + pair[None, :]
    cosines = tl.load(cosine + angle, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(sine + angle, mask=mask, other=0.0).to(tl.float32)
    start = x + source[:, None] + pair[None, :]
    first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + PAIRS, mask=mask, other=0.0).to(tl.float32)
    first, second = _rotate(first, second, cosines, sines, FORWARD)
    end = y + goal[:, None] + pair[None, :]
    tl.store(end, first.to(y.dtype.element_ty), mask=mask)
    tl.store(end + PAIRS, second.to(y.dtype.element_ty), mask=mask)


def _rotary_launch(x: Tensor, cosine: Tensor, sine: Tensor, y: Tensor, forward: bool) -> Launch:
    _, num_tokens, num_heads, width = x.shape
    num_rows = x.numel() // width
    block = power_of_two(width // 2)
    rows = tile_of(2 * block, x.dtype).rows
    values = (x, cosine, sine, y, num_rows, num_tokens, num_heads, *x.stride()[:3])
    constants = {"PAIRS": width // 2, "FORWARD": forward, "ROWS": rows, "BLOCK": block}
    return Launch(_rotary_kernel, (ceiling_division(num_rows, rows),), values, constants, NUM_WARPS)


def rotary_refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the kernel cannot take x of this dtype and width."""
    return refusal(device, dtype, width) or (f"a head of {width} channels has no pairs" if width % 2 else None)


def _rotary_fake(x: Tensor, cosine: Tensor, sine: Tensor, forward: bool) -> Tensor:
    return x.new_empty(x.shape)


def _rotary_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cosine, sine, ctx.forward = inputs
    ctx.save_for_backward(cosine, sine)


def _rotary_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    cosine, sine = ctx.saved_tensors
    return rotated(gradient, cosine, sine, not ctx.forward), None, None, None


@opaque(
    "rotary_triton(Tensor x, Tensor cosine, Tensor sine, bool forward) -> Tensor",
    _rotary_fake,
    _rotary_setup_context,
    _rotary_backward,
)
def rotated(x: Tensor, cosine: Tensor, sine: Tensor, forward: bool) -> Tensor:
    """Return x [b, s, heads, d] with its channel pairs rotated by the angles; backwards if `forward` is false."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = _rotary_fake(x, cosine, sine, forward)
    _rotary_launch(x, cosine.contiguous(), sine.contiguous(), y, forward).run()
    return y


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel pairs of x [b, s, heads, d] by the angles of cosine and sine [s, d/2].

    Pair i is channels i and i + d/2 (as in Llama and GPT-NeoX).
    """
    return rotated(x, cosine, sine, True)


REFUSALS = {"rotary": rotary_refusal}
