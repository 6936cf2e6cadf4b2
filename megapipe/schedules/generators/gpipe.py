"""GPipe: all forwards, then all backwards."""

import numpy as np

from megapipe.schedules.actions import Kind, rows_of
from megapipe.schedules.building_blocks import held_after_all_forwards
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("gpipe", "A", takes_two_bp=True, held=held_after_all_forwards)
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
