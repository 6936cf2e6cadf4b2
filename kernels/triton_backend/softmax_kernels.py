"""The kernels of `softmax`: the resident ones keep rows in registers, the chunked ones read them twice."""

import triton
import triton.language as tl

from megapipe.kernels.triton_backend.tiles import product


@triton.jit
def resident_kernel(
    scores,
    mask,
    y,
    num_rows,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax of ROWS whole rows of scores [batch, heads, queries, keys], each scaled and masked first.

    CAUSAL: query i sees keys up to i + keys - queries; WINDOW: of those only the last `window`. MASK: `mask` is True
    where a key is seen, and mask_batch, mask_head and mask_query are its strides. A row that sees no key becomes 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (key < keys)[None, :]
    # What is read ends at multiples of 16 keys: a bound within 16 bytes would split loads into single elements.
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
    # A row that sees nothing has a largest of minus infinity: exponentials and their sum are then 0, NaNs stay NaN.
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
    """One row: a running maximum and sum in every lane (Milakov and Gimelshein 2018, 1805.02867), then the results."""
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
def resident_gradient_kernel(dy, y, dx, num_rows, keys, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
    """The same for one row that is too long for registers: one pass for the sum, another for the result."""
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
