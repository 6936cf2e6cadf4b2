"""Grouped interleaving with split backward: interleaved 1F1B's bubble and less at 1F1B's memory."""

import numpy as np

from megapipe.schedules.actions import KIND, Kind, Rows
from megapipe.schedules.building_blocks import in_groups, round_robin
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
    """Return the rows of one rank, each backward as its halves."""
    rows = in_groups(num_ranks, num_microbatches, chunks, size, rank, ahead=num_ranks - 1 - rank)
    rows = np.repeat(rows, np.where(rows[:, KIND] == Kind.FORWARD, 1, 2), axis=0)
    halves = np.flatnonzero(rows[:, KIND] == Kind.BACKWARD)
    rows[halves, KIND] = np.resize([Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT], len(halves))
    return rows
