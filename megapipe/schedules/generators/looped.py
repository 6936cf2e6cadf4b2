"""Schedules over several stages a rank, placed round robin."""

import numpy as np

from megapipe.schedules.actions import MICROBATCH, Kind, rows_of
from megapipe.schedules.generators.flush import alternate
from megapipe.schedules.schedule import Sections


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, chunks: int, group_size: int | None = None) -> Sections:
    """1F1B over ``chunks`` stages a rank: its bubble divided by their number (Megatron-LM, arXiv 2104.04473,
    section 2.2).

    Micro-batches pass the rank's chunks in groups of ``group_size`` (``num_ranks`` by default); the last group may be
    smaller. Any number of micro-batches works: the order is made for whole groups, and what is too many is left out.
    """
    group_size = min(num_ranks if group_size is None else group_size, num_microbatches)
    groups = -(-num_microbatches // group_size)
    group, chunk, place = (grid.ravel() for grid in np.mgrid[:groups, :chunks, :group_size])
    microbatch = group * group_size + place
    # A rank may run at most twice the group ahead of the last one, or a chunk waits for itself around the loop.
    padded = (
        alternate(
            rows_of(Kind.FORWARD, chunk * num_ranks + rank, microbatch),
            rows_of(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, microbatch),
            warmup=(chunks - 1) * group_size + min(2 * (num_ranks - 1 - rank), 2 * group_size),
        )
        for rank in range(num_ranks)
    )
    return Sections.flushing(tuple(rows[rows[:, MICROBATCH] < num_microbatches] for rows in padded))


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
