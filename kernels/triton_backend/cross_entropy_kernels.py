"""Kernels of the vocabulary-parallel cross entropy: online softmax (Milakov and Gimelshein 2018, 1805.02867).

A maximum of minus infinity, which a row has whose logits are all minus infinity, is never subtracted: its sum is then
0, as another rank's merge needs, and not NaN. A NaN among the logits makes the sum NaN.

TAIL: the width is no multiple of 16, as GPT-2's vocabulary is none; columns behind the last multiple are taken apart,
so that all others still move 16 bytes at a time.
"""

import triton
import triton.language as tl

from megapipe.kernels.triton_backend.tiles import tile_indices


@triton.jit
def _finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _aligned(width, TAIL: tl.constexpr):
    """Columns that 16-byte accesses can take; the compiler sees by itself that this is a multiple of 16."""
    return width // 16 * 16 if TAIL else width


@triton.jit
def _with_more(largest, total, value):
    """(maximum, sum of exponentials above it) with further values."""
    before = largest
    largest = tl.maximum(before, tl.max(value, axis=0))
    safe = _finite(largest)
    return largest, total * tl.exp(before - safe) + tl.sum(tl.exp(value - safe), axis=0)


@triton.jit
def _running(source, width, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """(maximum, sum of exponentials above it) of a row. The cache is asked to keep the row for who reads it next."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    aligned = _aligned(width, TAIL)
    for start in range(0, aligned, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < aligned, other=float("-inf"), eviction_policy="evict_last")
        largest, total = _with_more(largest, total, value.to(tl.float32))
    if TAIL:
        column = aligned + tl.arange(0, 16)
        value = tl.load(source + column, mask=column < width, other=float("-inf"))
        largest, total = _with_more(largest, total, value.to(tl.float32))
    return largest, total


@triton.jit
def _target_column(columns, owned, row, inside):
    """The column of the row's label here, or -1."""
    own = tl.load(owned + row, mask=inside, other=0) != 0
    return tl.where(own, tl.load(columns + row, mask=inside, other=0).to(tl.int32), -1)


@triton.jit
def _store_statistics(statistics, row, num_rows, largest, total, target):
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, total)
    tl.store(statistics + 2 * num_rows + row, target)


@triton.jit
def statistics_kernel(
    logits, columns, owned, statistics, num_rows, width, row_stride, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """One row a program: its maximum, the sum of exponentials above that, and its target's logit."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    hit = _target_column(columns, owned, row, row >= 0)
    target = tl.load(source + hit, mask=hit >= 0, other=0.0).to(tl.float32)
    largest, total = _running(source, width, BLOCK, TAIL)
    _store_statistics(statistics, row, num_rows, largest, total, target)


@triton.jit
def _store_gradient(logits, source, column, mask, probability, hit):
    gradient = probability - tl.where(column == hit, 1.0, 0.0)
    tl.store(source + column, gradient.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def whole_row_kernel(
    logits,
    columns,
    owned,
    statistics,
    num_rows,
    width,
    row_stride,
    RESIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One row a program: its statistics, and its logits turned into the gradient of its loss.

    A resident row is one block, which stays in registers. Otherwise the second pass begins at the end of the row,
    which is in the cache still.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    hit = _target_column(columns, owned, row, row >= 0)
    target = tl.load(source + hit, mask=hit >= 0, other=0.0).to(tl.float32)
    aligned = _aligned(width, TAIL)
    last = aligned + tl.arange(0, 16)
    if RESIDENT:
        column = tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < aligned, other=float("-inf")).to(tl.float32)
        largest = tl.max(value, axis=0)
        if TAIL:
            rest = tl.load(source + last, mask=last < width, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, tl.max(rest, axis=0))
        value = tl.exp(value - _finite(largest))
        total = tl.sum(value, axis=0)
        if TAIL:
            rest = tl.exp(rest - _finite(largest))
            total += tl.sum(rest, axis=0)
            _store_gradient(logits, source, last, last < width, rest * (1.0 / total), hit)
        _store_gradient(logits, source, column, column < aligned, value * (1.0 / total), hit)
    else:
        largest, total = _running(source, width, BLOCK, TAIL)
        safe, factor = _finite(largest), 1.0 / total
        if TAIL:
            rest = tl.load(source + last, mask=last < width, other=0.0).to(tl.float32)
            tl.debug_barrier()  # every warp reads these columns, one overwrites them
            _store_gradient(logits, source, last, last < width, tl.exp(rest - safe) * factor, hit)
        blocks = tl.cdiv(aligned, BLOCK)
        for index in range(blocks):
            column = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
            mask = column < aligned
            value = tl.load(source + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            _store_gradient(logits, source, column, mask, tl.exp(value - safe) * factor, hit)
    _store_statistics(statistics, row, num_rows, largest, total, target)


@triton.jit
def _tile_gradient(
    logits,
    columns,
    owned,
    log_sum_exp,
    scale,
    result,
    num_rows,
    row_stride,
    result_stride,
    row,
    column,
    stop,
    REPEATED: tl.constexpr,
):
    """REPEATED: the tile is so small that several warps read it, of which one overwrites it."""
    inside = row < num_rows
    mask = inside[:, None] & (column < stop)[None, :]
    value = tl.load(logits + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.exp(value - tl.load(log_sum_exp + row, mask=inside, other=0.0)[:, None])
    if columns is not None:
        hit = _target_column(columns, owned, row, inside)
        value -= tl.where(column[None, :] == hit[:, None], 1.0, 0.0)
    if scale is not None:
        value *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
    if REPEATED:
        tl.debug_barrier()
    tl.store(result + row[:, None] * result_stride + column[None, :], value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def gradient_kernel(
    logits,
    columns,
    owned,
    log_sum_exp,
    scale,
    result,
    num_rows,
    width,
    row_stride,
    result_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """A tile of (exp(logits - log_sum_exp), minus 1 at the targets if there are any) times each row's scale, if any.

    result may be the logits.
    """
    row, column = tile_indices(width, ROWS, COLUMNS)
    aligned = _aligned(width, TAIL)
    _tile_gradient(
        logits,
        columns,
        owned,
        log_sum_exp,
        scale,
        result,
        num_rows,
        row_stride,
        result_stride,
        row,
        column,
        aligned,
        REPEATED=False,
    )
    if TAIL:
        across = tl.cdiv(width, COLUMNS)
        if tl.program_id(0) % across == across - 1:
            last = aligned + tl.arange(0, 16)
            _tile_gradient(
                logits,
                columns,
                owned,
                log_sum_exp,
                scale,
                result,
                num_rows,
                row_stride,
                result_stride,
                row,
                last,
                width,
                REPEATED=True,
            )
