"""How many messages of other ranks a stage has room for, by schedule: what lowering allocates, without lowering.

An activation that arrived stays where it is until the backward that needs it, a gradient until its own backward, or
the weight half of that. Receives are posted an action ahead, so that there is one slot more than is in use.
"""

import math
from typing import NamedTuple

from megapipe.planner.cost.in_flight import Counts
from megapipe.schedules.generators.registry import find_generator


class MessageSlots(NamedTuple):
    """Of one stage, for activations and for gradients."""

    activations: int
    gradients: int


def message_slots(
    name: str,
    held: Counts,
    chunk: int,
    num_ranks: int,
    rank: int,
    num_microbatches: int,
    *,
    splits: bool,
    flushes: bool,
) -> MessageSlots:
    """Those of the stage that is chunk `chunk` of a pipeline rank, at most a slot below what lowering finds.

    held: fullest moments of the rank (`most_held`). splits: backwards are halved. flushes: every step empties the
    pipeline; where none does, slots repeat with the step, which may take some more.
    """
    num_chunks = held.shape[1] // 2
    pending = int(held[:, num_chunks + chunk].max())
    if num_chunks > 1 and not splits and not find_generator(name).repeats:
        # The last rank has all gradients of a chunk before it may go on to the one below.
        last = rank == num_ranks - 1
        steady = 4 if num_microbatches > num_ranks else 2
        return MessageSlots(
            num_microbatches, min(num_microbatches, max(steady, num_microbatches - num_ranks) if last else steady)
        )
    live = int((held[:, chunk] + held[:, num_chunks + chunk]).max()) if splits else int(held[:, chunk].max()) + 1
    gradients = pending + 2 if splits or num_chunks == 1 else 3
    if not flushes:
        live = _periodic(live, num_microbatches)
        gradients = _periodic(gradients, num_microbatches)
    return MessageSlots(min(num_microbatches, live), min(num_microbatches, gradients))


def _periodic(live: int, num_microbatches: int) -> int:
    """Slots that a micro-batch has by its place in the step alone: equal blocks of at least as many as are live."""
    return num_microbatches if live > num_microbatches else math.ceil(num_microbatches / (num_microbatches // live))
