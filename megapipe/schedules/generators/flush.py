"""Schedules that flush the pipeline every step over one stage a rank."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import Kind, Rows, rows_of
from megapipe.schedules.schedule import Sections

if TYPE_CHECKING:
    from megapipe.schedules.generators.registry import Options

Floats = npt.NDArray[np.float64]


def gpipe(num_ranks: int, num_microbatches: int) -> Sections:
    """All forwards, then all backwards; every activation is kept (GPipe, arXiv 1811.06965, section 2.3).

    Backwards run in micro-batch order, so that gradients are summed in the order of a one-process run.
    """
    microbatches = np.arange(num_microbatches)
    return Sections.flushing(
        tuple(
            np.concatenate([rows_of(Kind.FORWARD, rank, microbatches), rows_of(Kind.BACKWARD, rank, microbatches)])
            for rank in range(num_ranks)
        )
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Sections:
    """One forward, one backward: at most ``num_ranks - rank`` activations are kept (PipeDream-Flush, arXiv 2006.09503,
    section 3.2; Megatron-LM, arXiv 2104.04473, section 2.2)."""
    microbatches = np.arange(num_microbatches)
    return Sections.flushing(
        tuple(
            alternate(
                rows_of(Kind.FORWARD, rank, microbatches),
                rows_of(Kind.BACKWARD, rank, microbatches),
                warmup=num_ranks - 1 - rank,
            )
            for rank in range(num_ranks)
        )
    )


def alternate(forwards: Rows, backwards: Rows, warmup: int) -> Rows:
    """``warmup`` forwards, then forward and backward in turn, then the backwards that are left.

    Both tables have the same number of rows n; a warm-up above n is all of them.
    """
    count = len(forwards)
    warmup = min(warmup, count)
    index = np.arange(count)
    forward_places = np.where(index < warmup, index, 2 * index - warmup)
    backward_places = np.where(index < count - warmup, warmup + 2 * index + 1, count + index)
    rows = np.empty((2 * count, forwards.shape[1]), dtype=forwards.dtype)
    rows[forward_places], rows[backward_places] = forwards, backwards
    return rows


def warming_up(num_ranks: int, num_microbatches: int, chunks: int, options: "Options") -> Floats:
    """Return the micro-batches of each chunk that ranks hold at least at their fullest, shape [ranks, chunks], where
    rank r runs p - r forwards before its first backward.

    A planner's search asks for this bound before it makes an order.
    """
    ahead = num_ranks - np.arange(num_ranks)
    return np.minimum(ahead, num_microbatches).astype(np.float64)[:, None]


def collecting(num_ranks: int, num_microbatches: int, chunks: int, options: "Options") -> Floats:
    """Return what `warming_up` returns, where all forwards run before their backwards; halves may run in any order."""
    return np.full((num_ranks, chunks), 0.0 if options.get("two_bp", False) else float(num_microbatches))
