"""Schedules over several stages a rank, placed round robin."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from megapipe.schedules.actions import KIND, MICROBATCH, Kind, Rows, rows_of
from megapipe.schedules.generators.flush import Floats, alternate
from megapipe.schedules.schedule import Sections

if TYPE_CHECKING:
    from megapipe.schedules.generators.registry import Options

MORE_HELD: Final = 2
"""Micro-batches of activations that the default group size may add to a rank's peak."""


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, chunks: int, group_size: int | None = None) -> Sections:
    """1F1B over ``chunks`` stages a rank: its bubble divided by their number (Megatron-LM, arXiv 2104.04473,
    section 2.2).

    Micro-batches pass the rank's chunks in groups of ``group_size`` (:func:`default_group_size` by default); the last
    group may be smaller. Any number of micro-batches works: the order is built for whole groups, and rows of
    micro-batches that do not exist are removed.
    """
    if group_size is None:
        group_size = default_group_size(num_ranks, num_microbatches, chunks)
    return Sections.flushing(
        tuple(_in_groups(num_ranks, num_microbatches, chunks, group_size, rank) for rank in range(num_ranks))
    )


@lru_cache(maxsize=4096)
def default_group_size(num_ranks: int, num_microbatches: int, chunks: int) -> int:
    """Return the default number of consecutive micro-batches that pass through a chunk.

    A last group that is smaller than the pipeline leaves ranks idle. So if the ranks do not divide the micro-batches,
    the group size is ceil(m / floor(m / p)) instead of p, which is never slower, unless this adds more than
    ``MORE_HELD`` micro-batches to the peak of a rank.
    """
    rounds = num_microbatches // num_ranks
    larger = -(-num_microbatches // rounds) if rounds else num_ranks
    if larger == num_ranks or chunks == 1:
        return num_ranks
    usual, held = (_peak_held(num_ranks, num_microbatches, chunks, size) for size in (num_ranks, larger))
    return larger if held <= usual + MORE_HELD * chunks else num_ranks


def _in_groups(num_ranks: int, num_microbatches: int, chunks: int, group_size: int, rank: int) -> Rows:
    """Return the rows of one rank."""
    group_size = min(group_size, num_microbatches)
    groups = -(-num_microbatches // group_size)
    group, chunk, place = (grid.ravel() for grid in np.mgrid[:groups, :chunks, :group_size])
    microbatch = group * group_size + place
    rows = alternate(
        rows_of(Kind.FORWARD, chunk * num_ranks + rank, microbatch),
        rows_of(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, microbatch),
        # A rank may run at most two groups ahead of the last rank, or a chunk would wait for itself around the loop.
        warmup=(chunks - 1) * group_size + min(2 * (num_ranks - 1 - rank), 2 * group_size),
    )
    return rows[rows[:, MICROBATCH] < num_microbatches]


def _peak_held(num_ranks: int, num_microbatches: int, chunks: int, group_size: int) -> int:
    """Peak number of chunk activations on the first rank, which holds the most."""
    rows = _in_groups(num_ranks, num_microbatches, chunks, group_size, 0)
    return int(np.cumsum(np.where(rows[:, KIND] == Kind.FORWARD, 1, -1)).max())


def in_groups(num_ranks: int, num_microbatches: int, chunks: int, options: "Options") -> Floats:
    """Return what `flush.warming_up` returns, for `interleaved_1f1b`: (v - 1) g + 2 (p - 1 - r) forwards and the
    next one run before the first backward."""
    group = options.get("group_size", default_group_size(num_ranks, num_microbatches, chunks))
    group = min(group, num_microbatches)
    ranks = np.arange(num_ranks)[:, None]
    forwards = (chunks - 1) * group + np.minimum(2 * (num_ranks - 1 - ranks), 2 * group) + 1
    before = np.arange(chunks)[None] * group
    first = np.maximum(np.minimum(forwards - before, group), 0)
    # A last group that is smaller leaves its places empty.
    second = np.maximum(np.minimum(forwards - chunks * group - before, min(group, num_microbatches - group)), 0)
    return (first + second).astype(np.float64)


def modular(num_ranks: int, num_microbatches: int, *, chunks: int) -> Sections:
    """All micro-batches through a chunk before the next chunk: layered gradient accumulation in a pipeline
    (arXiv 2106.02679; as breadth-first pipeline parallelism arXiv 2211.05953).

    A chunk's gradient is complete after one run of backwards, so its reduction overlaps all that follow, and sharded
    weights are gathered once a pass whatever the number of micro-batches. Every activation is kept.
    """
    chunk, microbatch = (grid.ravel() for grid in np.mgrid[:chunks, :num_microbatches])
    return Sections.flushing(
        tuple(
            np.concatenate(
                [
                    rows_of(Kind.FORWARD, chunk * num_ranks + rank, microbatch),
                    rows_of(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, microbatch),
                ]
            )
            for rank in range(num_ranks)
        )
    )
