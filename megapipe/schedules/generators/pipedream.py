"""PipeDream: an update after every micro-batch, with as many weight versions as micro-batches are in flight."""

from megapipe.schedules.building_blocks import Policy, held_after_warmup
from megapipe.schedules.generators._never_flushing import check_enough_microbatches, never_flushing
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


def _policy(num_ranks: int, num_microbatches: int, *, vertical_sync: bool = False) -> Policy:
    versions = tuple(num_ranks if vertical_sync else num_ranks - rank for rank in range(num_ranks))
    return Policy(versions, updates_per_step=num_microbatches)


@schedule("pipedream", "B", policy=_policy, check=check_enough_microbatches, repeats=True, held=held_after_warmup)
def pipedream(num_ranks: int, num_microbatches: int) -> Sections:
    """PipeDream: 1F1B without a flush and an update after every micro-batch, weights stashed until their backward
    (arXiv 1806.03377; SOSP 2019, section 3.3).

    Rank r keeps ``num_ranks - r`` versions; with vertical sync, every rank keeps as many as the first one.
    """
    return never_flushing(num_ranks, num_microbatches)
