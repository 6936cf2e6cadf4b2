"""PipeDream-2BW: no flush, on two weight versions."""

from typing import Literal

from megapipe.schedules.building_blocks import Policy, held_after_warmup
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators.pipedream import check_enough_microbatches, never_flushing
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


def _policy(num_ranks: int, num_microbatches: int, *, update: Literal["eager", "lazy"] = "lazy") -> Policy:
    """A lazy update waits right before the rank's first forward that needs it, so reductions overlap with the
    backwards in between, for one more gradient buffer."""
    if update not in ("eager", "lazy"):
        raise ScheduleError(f"update is {update!r}; it must be eager or lazy")
    return Policy((2,) * num_ranks, gradient_buffers=2 if update == "lazy" else 1)


@schedule(
    "2bw",
    "B",
    policy=_policy,
    check=check_enough_microbatches,
    repeats=True,
    held=held_after_warmup,
    paper="arXiv 2006.09503",
)
def two_buffered_weights(num_ranks: int, num_microbatches: int) -> Sections:
    """PipeDream-2BW: 1F1B without a flush on two weight versions (arXiv 2006.09503, section 3.1).

    Batch t computes with the weights before batch t-1's update: ``W(t+1) = W(t) - lr * gradient(W(t-1))``, on every
    stage alike. A step needs at least one micro-batch per rank.
    """
    return never_flushing(num_ranks, num_microbatches)
