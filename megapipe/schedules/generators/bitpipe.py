"""BitPipe: two V-shaped interleaved pipelines in opposite directions."""

from megapipe.schedules.building_blocks import bidirectional_v
from megapipe.schedules.generators.chimera import merged, require_whole_rounds
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("bitpipe", "C", placement=bidirectional_v, chunks=4, check=require_whole_rounds, search="never")
def bitpipe(num_ranks: int, num_microbatches: int) -> Sections:
    """Two stages a rank in a V for each of two directions: half of Chimera's bubble, twice its transfers (BitPipe,
    arXiv 2410.19367, section 3).

    For p ranks and m micro-batches, with backwards as long as forwards, the idle part of the makespan is
    (p - 2) / (4m + p - 2); with backwards twice as long and m = p, it is (p - 2) / (3m + p - 2). Rank r holds
    (3p + 2) / 4 + min(r, p - 1 - r) / 2 micro-batches.
    """
    return merged(num_ranks, num_microbatches, bidirectional_v(num_ranks, 4))
