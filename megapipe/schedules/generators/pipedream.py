"""PipeDream: an update after every micro-batch, and one weight version for each micro-batch in flight.

Its order never flushes, as that of PipeDream-2BW: the next step's forwards run while the last step's backwards drain.
On rank r the pipeline stays ``num_ranks - 1 - r`` micro-batches deep. The prologue fills it with step 0's forwards,
each body runs one more step's forwards, each with the backward that is due, and the epilogue drains.
"""

import numpy as np

from megapipe.schedules.actions import Kind, rows_of
from megapipe.schedules.building_blocks import Policy, alternate, held_after_warmup
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


def check_enough_microbatches(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise ScheduleError if a step has fewer micro-batches than the pipeline is deep."""
    if num_microbatches < num_ranks:
        raise ScheduleError(
            f"{name} needs at least as many micro-batches as pipeline ranks: "
            f"{num_microbatches} micro-batches on {num_ranks} ranks would need "
            f"weights that do not exist yet; use at least {num_ranks} micro-batches"
        )


def never_flushing(num_ranks: int, num_microbatches: int) -> Sections:
    """Return 1F1B without a flush."""
    microbatches = np.arange(num_microbatches)
    prologue, body, epilogue = [], [], []
    for rank in range(num_ranks):
        depth = num_ranks - 1 - rank
        forwards = rows_of(Kind.FORWARD, rank, microbatches)
        backwards = rows_of(Kind.BACKWARD, rank, microbatches)
        filled = alternate(forwards, backwards, depth)
        prologue.append(filled[: len(filled) - depth])
        next_forwards = rows_of(Kind.FORWARD, rank, microbatches + num_microbatches)
        due = rows_of(Kind.BACKWARD, rank, microbatches + num_microbatches - depth)
        body.append(alternate(next_forwards, due, 0))
        epilogue.append(backwards[num_microbatches - depth :])
    return Sections(tuple(prologue), tuple(body), tuple(epilogue))


def _policy(num_ranks: int, num_microbatches: int, *, vertical_sync: bool = False) -> Policy:
    versions = tuple(num_ranks if vertical_sync else num_ranks - rank for rank in range(num_ranks))
    return Policy(versions, updates_per_step=num_microbatches)


@schedule("pipedream", "B", policy=_policy, check=check_enough_microbatches, repeats=True, held=held_after_warmup)
def pipedream(num_ranks: int, num_microbatches: int) -> Sections:
    """PipeDream: 1F1B without a flush and an update after every micro-batch, weights stashed until their backward
    (arXiv 1806.03377; SOSP 2019, section 3.3).

    Rank r keeps ``num_ranks - r`` versions; with vertical sync, every rank keeps the number of the first one.
    """
    return never_flushing(num_ranks, num_microbatches)
