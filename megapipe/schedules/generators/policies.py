"""When a schedule writes weights: how many versions a stage keeps, how often a step updates, and how late."""

from typing import Literal, NamedTuple

from megapipe.schedules.errors import ScheduleError


class Policy(NamedTuple):
    """Versions kept on each rank, updates in a step, and gradient buffers (2 let an update wait for the next step's
    first forward that needs it)."""

    versions_by_rank: tuple[int, ...]
    updates_per_step: int = 1
    gradient_buffers: int = 1

    @property
    def flushes(self) -> bool:
        """Whether every step ends with an empty pipeline."""
        return max(self.versions_by_rank) == 1 and self.updates_per_step == 1


def flush_policy(num_ranks: int, num_microbatches: int) -> Policy:
    """One version, written when the step's gradients are complete."""
    return Policy((1,) * num_ranks)


def two_buffered_policy(num_ranks: int, num_microbatches: int, *, update: Literal["eager", "lazy"] = "lazy") -> Policy:
    """Two versions everywhere. A lazy update waits right before the rank's first forward that needs it, so reductions
    hide behind the backwards in between, for one more gradient buffer."""
    if update not in ("eager", "lazy"):
        raise ScheduleError(f"update is {update!r}; it must be eager or lazy")
    return Policy((2,) * num_ranks, gradient_buffers=2 if update == "lazy" else 1)


def pipedream_policy(num_ranks: int, num_microbatches: int, *, vertical_sync: bool = False) -> Policy:
    """As many versions as micro-batches are in flight on the rank, on the first rank with vertical sync."""
    versions = tuple(num_ranks if vertical_sync else num_ranks - rank for rank in range(num_ranks))
    return Policy(versions, updates_per_step=num_microbatches)
