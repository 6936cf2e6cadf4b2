"""V-Half: half of 1F1B's activation memory."""

from megapipe.schedules.building_blocks import EQUAL_TIMES, Times, v_shape
from megapipe.schedules.generators._zero_bubble import BuildingBlock, repeated
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("v_half", "A", placement=v_shape, chunks=2, splits=True)
def v_half(num_ranks: int, num_microbatches: int, *, times: Times = EQUAL_TIMES) -> Sections:
    """Two stages a rank in a V that hold floor((p + 2) / 2) micro-batches, half as many as 1F1B, at about half of its
    bubble (V-Half of arXiv 2405.15362, section 3).

    Twice as much is sent as in 1F1B. ``times``: those for which weight halves are placed.
    """
    block = BuildingBlock(2, 1, (0, 3 if num_ranks % 2 == 0 else 0, 1))
    return repeated(num_ranks, num_microbatches, block, 2 * ((num_ranks + 2) // 2), times)
