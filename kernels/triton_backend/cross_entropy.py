"""Vocabulary-parallel cross entropy in Triton: the functions of `megapipe.kernels.reference.cross_entropy`.

A rank that has the whole vocabulary reads its logits from memory and writes them only once: a row stays in registers
up to `RESIDENT` columns, and in the cache above that. If the vocabulary is sharded, a rank reads its logits, the ranks
exchange 12 bytes per row, and then it reads and writes its logits a second time.

The combination of output projection and cross entropy uses torch's products, which our own kernels would not improve;
between the products, these kernels read and write the logits in place. Only one copy of the saved tensor exists: the
product is written to the memory of the gradient.

The softmax is online (Milakov and Gimelshein 2018, 1805.02867). A maximum of minus infinity, in a row whose logits are
all minus infinity, is never subtracted: the row's sum is then 0, as the merge with other ranks needs, and not NaN. A
NaN among the logits makes the sum NaN. TAIL: the width is not a multiple of 16, for example GPT-2's vocabulary;
columns after the last multiple are read separately, so that all others still move 16 bytes at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.cross_entropy import backward_by, projected
from megapipe.kernels.registry import opaque
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.triton_backend.launch import Launch, power_of_two
from megapipe.kernels.triton_backend.tiles import over_tiles, tile_indices
from megapipe.spec.linear import chunk_rows


@triton.jit
def _finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _aligned(width, TAIL: tl.constexpr):
    """Return the number of columns for 16-byte accesses, in a form that the compiler recognises as a multiple of
    16."""
    return width // 16 * 16 if TAIL else width


@triton.jit
def _with_more(largest, total, value):
    """Return a row's maximum and sum of exp(value - maximum), updated with further values."""
    before = largest
    largest = tl.maximum(before, tl.max(value, axis=0))
    safe = _finite(largest)
    return largest, total * tl.exp(before - safe) + tl.sum(tl.exp(value - safe), axis=0)


@triton.jit
def _running(source, width, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Return a row's maximum and sum of exp(value - maximum). Loads ask the cache to keep the row for the next
    reader."""
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
    """Return the column of the row's label on this rank, or -1."""
    is_owned = tl.load(owned + row, mask=inside, other=0) != 0
    return tl.where(is_owned, tl.load(columns + row, mask=inside, other=0).to(tl.int32), -1)


@triton.jit
def _store_statistics(statistics, row, num_rows, largest, total, target):
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, total)
    tl.store(statistics + 2 * num_rows + row, target)


@triton.jit
def statistics_kernel(
    logits, columns, owned, statistics, num_rows, width, row_stride, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """Statistics of one row per program: its maximum, the sum of exp(logit - maximum), and its target's logit."""
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
    """Compute the statistics of one row per program, and turn its logits into the gradient of its loss.

    A resident row is one block, which stays in registers. Otherwise the second pass starts at the end of the row,
    which is still in the cache.
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
            tl.debug_barrier()  # every warp reads these columns, and one warp overwrites them
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
    num_rows,
    row_stride,
    row,
    column,
    stop,
    REPEATED: tl.constexpr,
):
    """Overwrite one tile with its gradient. REPEATED: the tile is so small that several warps read it and one
    overwrites it."""
    inside = row < num_rows
    mask = inside[:, None] & (column < stop)[None, :]
    place = logits + row[:, None] * row_stride + column[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    value = tl.exp(value - tl.load(log_sum_exp + row, mask=inside, other=0.0)[:, None])
    hit = _target_column(columns, owned, row, inside)
    value -= tl.where(column[None, :] == hit[:, None], 1.0, 0.0)
    if scale is not None:
        value *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
    if REPEATED:
        tl.debug_barrier()
    tl.store(place, value.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def gradient_kernel(
    logits,
    columns,
    owned,
    log_sum_exp,
    scale,
    num_rows,
    width,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Overwrite a tile of the logits with exp(logits - log_sum_exp), minus 1 at the targets, times each row's scale if
    it is not None."""
    row, column = tile_indices(width, ROWS, COLUMNS)
    aligned = _aligned(width, TAIL)
    _tile_gradient(
        logits,
        columns,
        owned,
        log_sum_exp,
        scale,
        num_rows,
        row_stride,
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
                num_rows,
                row_stride,
                row,
                last,
                width,
                REPEATED=True,
            )


RESIDENT = 16384
"""Largest number of columns for which a row stays in registers: 16 in each of 1024 threads."""

_STREAMED, _WHOLE = 8192, 32768
# Columns of a block: at most the first number for statistics, the second one for rows above `RESIDENT` that become
# gradients. The latter is so large that one program fills a multiprocessor: the rows that are processed at the same
# time, 34 MB of 128k bf16 columns on 132 multiprocessors, then stay in the cache until their second read.

_ELEMENTS_PER_WARP = 512


def _warps(block: int) -> int:
    return min(32, max(4, block // _ELEMENTS_PER_WARP))


def _has_tail(logits: Tensor) -> bool:
    return logits.shape[1] % 16 != 0


def _statistics_launch(logits: Tensor, columns: Tensor, owned: Tensor, result: Tensor) -> Launch:
    block = min(power_of_two(max(logits.shape[1], 1)), _STREAMED)
    values = (logits, columns, owned, result, *logits.shape, logits.stride(0))
    constants = {"BLOCK": block, "TAIL": _has_tail(logits)}
    return Launch(statistics_kernel, (logits.shape[0],), values, constants, _warps(block))


def _whole_row_launch(logits: Tensor, columns: Tensor, owned: Tensor, result: Tensor) -> Launch:
    resident = logits.shape[1] <= RESIDENT
    block = power_of_two(max(logits.shape[1], 1)) if resident else _WHOLE
    values = (logits, columns, owned, result, *logits.shape, logits.stride(0))
    constants = {"RESIDENT": resident, "BLOCK": block, "TAIL": _has_tail(logits)}
    return Launch(whole_row_kernel, (logits.shape[0],), values, constants, _warps(block))


def _gradient_launch(
    logits: Tensor, columns: Tensor, owned: Tensor, log_sum_exp: Tensor, scale: Tensor | None
) -> Launch:
    tensors = (logits, columns, owned, log_sum_exp, scale)
    return over_tiles(gradient_kernel, tensors, logits, logits.stride(0), TAIL=_has_tail(logits))


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _empty_statistics(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(3, x.shape[0], dtype=torch.float32)


@opaque(
    "cross_entropy_statistics_triton(Tensor logits, Tensor columns, Tensor owned) -> Tensor",
    _empty_statistics,
)
def cross_entropy_statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """Return [3, n] in fp32 for logits [n, v]: the largest logit, the sum of exp(logit - largest), and the target's
    logit or 0.

    columns: int64 [n], each row's label. owned: bool [n], whether that column is on this rank.
    """
    result = _empty_statistics(logits)
    _statistics_launch(_rows(logits), columns.contiguous(), owned.contiguous(), result).run()
    return result


@opaque(
    "cross_entropy_whole_rows_triton(Tensor(a!) logits, Tensor columns, Tensor owned) -> Tensor",
    _empty_statistics,
)
def cross_entropy_statistics_and_gradient(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """Return the `statistics` of a rank that has the whole vocabulary, and turn the logits into the gradient of each
    row's loss."""
    rows = _rows(logits)
    result = _empty_statistics(logits)
    _whole_row_launch(rows, columns.contiguous(), owned.contiguous(), result).run()
    if rows is not logits:
        logits.copy_(rows)
    return result


@opaque(
    "cross_entropy_gradient_triton(Tensor(a!) logits, Tensor columns, Tensor owned, "
    "Tensor log_sum_exp, Tensor? scale) -> ()",
    lambda logits, columns, owned, log_sum_exp, scale: None,
)
def cross_entropy_gradient(
    logits: Tensor, columns: Tensor, owned: Tensor, log_sum_exp: Tensor, scale: Tensor | None
) -> None:
    """Turn logits [n, v] in place into the gradient of each row's loss, times the row's scale (fp32 [n]) if given.

    log_sum_exp: fp32 [n], over the columns of all ranks.
    """
    rows = _rows(logits)
    scale = None if scale is None else scale.contiguous()
    _gradient_launch(rows, columns.contiguous(), owned.contiguous(), log_sum_exp.contiguous(), scale).run()
    if rows is not logits:
        logits.copy_(rows)


@opaque(
    "linear_cross_entropy_statistics_triton(Tensor x, Tensor weight, Tensor columns, "
    "Tensor owned, SymInt num_columns, Tensor? bias=None) -> Tensor",
    _empty_statistics,
)
def linear_cross_entropy_statistics(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, bias: Tensor | None = None
) -> Tensor:
    """Return the statistics of the logits [3, n], which `megapipe.kernels.reference.cross_entropy` describes."""
    result = _empty_statistics(x)
    used, added = weight[:num_columns], None if bias is None else bias[:num_columns]
    step = chunk_rows(num_columns, x.dtype.itemsize)
    for first in range(0, x.shape[0], step):
        chunk = slice(first, first + step)
        result[:, chunk] = cross_entropy_statistics(projected(x[chunk], used, added), columns[chunk], owned[chunk])
    return result


@opaque(
    "linear_cross_entropy_gradient_triton(Tensor x, Tensor weight, Tensor columns, "
    "Tensor owned, SymInt num_columns, bool alone) -> (Tensor, Tensor)",
    lambda x, weight, *_: (_empty_statistics(x), x.new_empty(x.shape[0], weight.shape[0])),
)
def linear_cross_entropy_statistics_and_gradient(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, alone: bool
) -> tuple[Tensor, Tensor]:
    """Return (statistics [3, n], gradient of each row's loss by its logits [n, stored] in x's dtype, 0 in the
    padding).

    alone: whether this rank has the whole vocabulary. If not, call `complete_gradient` after the exchange.
    """
    gradient = x.new_empty(x.shape[0], weight.shape[0])
    gradient[:, num_columns:].zero_()
    logits = gradient[:, :num_columns]
    torch.mm(x, weight[:num_columns].t(), out=logits)
    pass_over = cross_entropy_statistics_and_gradient if alone else cross_entropy_statistics
    return pass_over(logits, columns, owned), gradient


@opaque(
    "linear_cross_entropy_complete_triton(Tensor(a!) gradient, Tensor columns, Tensor owned, "
    "SymInt num_columns, Tensor own, Tensor log_sum_exp) -> ()",
    lambda gradient, columns, owned, num_columns, own, log_sum_exp: None,
)
def linear_cross_entropy_complete_gradient(
    gradient: Tensor, columns: Tensor, owned: Tensor, num_columns: int, own: Tensor, log_sum_exp: Tensor
) -> None:
    """Complete, in place, the gradient of `statistics_and_gradient` on a rank that has a part of the vocabulary.

    gradient: has the logits so far, so `own`, this rank's statistics, is not needed. log_sum_exp: fp32 [n].
    """
    cross_entropy_gradient(gradient[:, :num_columns], columns, owned, log_sum_exp, None)


@opaque(
    "linear_cross_entropy_backward_triton(Tensor x, Tensor weight, Tensor columns, Tensor owned, SymInt num_columns, "
    "Tensor log_sum_exp, Tensor scale, Tensor? bias=None) -> Tensor[]",
    lambda x, weight, columns, owned, num_columns, log_sum_exp, scale, bias=None: [
        x.new_empty(x.shape),
        *(each.new_empty(each.shape, dtype=torch.float32) for each in (weight, bias) if each is not None),
    ],
)
def linear_cross_entropy_backward(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    log_sum_exp: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of the losses' weighted sum: for x [n, h] in its dtype; in fp32 for weight [stored, h] and,
    if there is one, for bias [stored].

    scale: fp32 [n], each row's weight. Recomputes the logits.
    """
    step = chunk_rows(num_columns, x.dtype.itemsize)
    return backward_by(cross_entropy_gradient, step, x, weight, columns, owned, num_columns, log_sum_exp, scale, bias)
