"""Kernels of the vocabulary-parallel cross entropy: online softmax (Milakov and Gimelshein 2018, 1805.02867).

A maximum of minus infinity, which a row has whose logits are all minus infinity, is never subtracted: its sum is then
0, as another rank's merge needs, and not NaN. A NaN among the logits makes the sum NaN.
"""

import triton
import triton.language as tl

from megapipe.kernels.triton_backend.tiles import tile_indices


@triton.jit
def _finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _running(source, width, BLOCK: tl.constexpr):
    """(maximum, sum of exponentials above it) of a row. The cache is asked to keep the row for who reads it next."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < width, other=float("-inf"), eviction_policy="evict_last")
        value = value.to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(value, axis=0))
        safe = _finite(largest)
        total = total * tl.exp(before - safe) + tl.sum(tl.exp(value - safe), axis=0)
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
def statistics_kernel(logits, columns, owned, statistics, num_rows, width, row_stride, BLOCK: tl.constexpr):
    """One row a program: its maximum, the sum of exponentials above that, and its target's logit."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    hit = _target_column(columns, owned, row, row >= 0)
    target = tl.load(source + hit, mask=hit >= 0, other=0.0).to(tl.float32)
    largest, total = _running(source, width, BLOCK)
    _store_statistics(statistics, row, num_rows, largest, total, target)


@triton.jit
def whole_row_kernel(
    logits, columns, owned, statistics, num_rows, width, row_stride, RESIDENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its statistics, and its logits turned into the gradient of its loss.

    A resident row is one block, which stays in registers. Otherwise the second pass begins at the end of the row,
    which is in the cache still.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    hit = _target_column(columns, owned, row, row >= 0)
    target = tl.load(source + hit, mask=hit >= 0, other=0.0).to(tl.float32)
    if RESIDENT:
        column = tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < width, other=float("-inf")).to(tl.float32)
        largest = tl.max(value, axis=0)
        value = tl.exp(value - _finite(largest))
        total = tl.sum(value, axis=0)
        gradient = value * (1.0 / total) - tl.where(column == hit, 1.0, 0.0)
        tl.store(source + column, gradient.to(logits.dtype.element_ty), mask=column < width)
    else:
        largest, total = _running(source, width, BLOCK)
        safe, factor = _finite(largest), 1.0 / total
        blocks = tl.cdiv(width, BLOCK)
        for index in range(blocks):
            column = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
            mask = column < width
            value = tl.load(source + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            gradient = tl.exp(value - safe) * factor - tl.where(column == hit, 1.0, 0.0)
            tl.store(source + column, gradient.to(logits.dtype.element_ty), mask=mask)
    _store_statistics(statistics, row, num_rows, largest, total, target)


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
):
    """A tile of (exp(logits - log_sum_exp), minus 1 at the targets if there are any) times each row's scale, if any.

    result may be the logits.
    """
    row, column = tile_indices(width, ROWS, COLUMNS)
    inside = row < num_rows
    mask = inside[:, None] & (column < width)[None, :]
    value = tl.load(logits + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.exp(value - tl.load(log_sum_exp + row, mask=inside, other=0.0)[:, None])
    if columns is not None:
        hit = _target_column(columns, owned, row, inside)
        value -= tl.where(column[None, :] == hit[:, None], 1.0, 0.0)
    if scale is not None:
        value *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
    tl.store(result + row[:, None] * result_stride + column[None, :], value.to(result.dtype.element_ty), mask=mask)
