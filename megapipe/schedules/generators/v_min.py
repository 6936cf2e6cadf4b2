"""V-Min: a third of 1F1B's activation memory."""

from megapipe.schedules.building_blocks import EQUAL_TIMES, Times, v_shape
from megapipe.schedules.generators._zero_bubble import BuildingBlock, repeated
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("v_min", "A", placement=v_shape, chunks=2, splits=True)
def v_min(num_ranks: int, num_microbatches: int, *, times: Times = EQUAL_TIMES) -> Sections:
    """Two stages a rank in a V that hold floor((p + 4) / 3) micro-batches, a third as many as 1F1B, at two thirds
    of its bubble; that grows with the number of micro-batches where halves take unequal times (V-Min of arXiv
    2405.15362, section 3).

    Twice as much is sent as in 1F1B. ``times``: those for which weight halves are placed.
    """
    block = BuildingBlock(1, 1, (0, 2 if num_ranks % 3 == 0 else 0, 0))
    return repeated(num_ranks, num_microbatches, block, 2 * ((num_ranks + 4) // 3), times)
