"""Chimera: two pipelines in opposite directions over the same ranks."""

from megapipe.schedules.building_blocks import bidirectional
from megapipe.schedules.generators._both_ways import merged, require_whole_rounds
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("chimera", "C", placement=bidirectional, chunks=2, check=require_whole_rounds, search="never")
def chimera(num_ranks: int, num_microbatches: int) -> Sections:
    """1F1B in both directions at once: every other micro-batch runs up the ranks, which hold the model twice (Chimera,
    arXiv 2107.06925, section 3.1; its forward doubling and backward halving are not used).

    For p ranks and m micro-batches, with backwards as long as forwards, the idle part of the makespan is
    (p - 2) / (2m + p - 2), table 2 of the paper; with backwards twice as long and m = p, (p - 2) / (1.5m + p - 2).
    Rank r holds p / 2 + 1 + min(r, p - 1 - r) micro-batches.
    """
    return merged(num_ranks, num_microbatches, bidirectional(num_ranks, 2))
