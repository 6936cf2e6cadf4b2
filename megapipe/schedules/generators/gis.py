"""Grouped interleaving with split backward: interleaved 1F1B's bubble and less at 1F1B's memory."""

import numpy as np

from megapipe.schedules.actions import KIND, MICROBATCH, Kind, Rows, rows_of
from megapipe.schedules.building_blocks import alternate, round_robin
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("gis", "A", placement=round_robin, chunks=2, splits=True, repeats=True)
def gis(num_ranks: int, num_microbatches: int, *, chunks: int, group_size: int | None = None) -> Sections:
    """Interleaved 1F1B with fewer forwards before the first backward, because gradients need not wait for weight
    halves: 1F1B's activation memory, and a bubble of p - 1 forwards and input halves of a chunk (GIS of
    PipeOffload, arXiv 2503.01328, section 3.2).

    Micro-batches pass the rank's chunks in groups of ``group_size``, by default the number of ranks p. Smaller groups
    hold less and idle more, down to ceil(p / 2): in smaller groups a chunk would wait for itself, so this size
    replaces them.
    """
    smallest = -(-num_ranks // 2)
    size = num_ranks if group_size is None else max(group_size, smallest)
    return Sections.flushing(_grouped(num_ranks, num_microbatches, chunks, size, rank) for rank in range(num_ranks))


def _grouped(num_ranks: int, num_microbatches: int, chunks: int, size: int, rank: int) -> Rows:
    """Return the rows of one rank."""
    groups = -(-num_microbatches // size)
    group, chunk, place = (grid.ravel() for grid in np.mgrid[:groups, :chunks, :size])
    microbatch = group * size + place
    down, up = chunk * num_ranks + rank, (chunks - 1 - chunk) * num_ranks + rank
    rows = alternate(
        rows_of(Kind.FORWARD, down, microbatch),
        rows_of(Kind.BACKWARD_INPUT, up, microbatch),
        warmup=(chunks - 1) * size + num_ranks - 1 - rank,
    )
    rows = np.repeat(rows, np.where(rows[:, KIND] == Kind.FORWARD, 1, 2), axis=0)
    second = np.flatnonzero(rows[:, KIND] == Kind.BACKWARD_INPUT)[1::2]
    rows[second, KIND] = Kind.BACKWARD_WEIGHT
    return rows[rows[:, MICROBATCH] < num_microbatches]
