"""Seq1F1B: 1F1B over slices of sequences."""

import numpy as np

from megapipe.schedules.actions import Kind, rows_of
from megapipe.schedules.building_blocks import alternate
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("seq1f1b", "C")
def seq1f1b(num_ranks: int, num_microbatches: int, *, slices: int = 4) -> Sections:
    """1F1B whose unit is one of ``slices`` parts of a sequence: its bubble divided by their number, and far fewer
    activations (Seq1F1B, arXiv 2406.03488, section 3.2).

    A forward reads the keys and values of the slices before it, so slices run forward in their order and backward in
    the reverse. Rank r starts with p - r - 2 + s forwards of s slices.
    """
    order = np.arange(num_microbatches * slices)
    reverse = order - 2 * (order % slices) + slices - 1
    return Sections.flushing(
        tuple(
            alternate(
                rows_of(Kind.FORWARD, rank, order),
                rows_of(Kind.BACKWARD, rank, reverse),
                warmup=num_ranks - rank - 2 + slices,
            )
            for rank in range(num_ranks)
        )
    )
