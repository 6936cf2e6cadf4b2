"""ZB-V: two stages on each rank, down the ranks and back up."""

from megapipe.schedules.building_blocks import Step, rows_from_steps, v_shape
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT, WEIGHT, numbered
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("zb_v", "A", placement=v_shape, chunks=2, splits=True, repeats=True, search="promising")
def zb_v(num_ranks: int, num_microbatches: int) -> Sections:
    """Two stages a rank, placed in a V: no bubble at 1F1B's activation memory where forward, input half and weight
    half take equal time (the ZB-V schedule of arXiv 2401.10241).

    The order is made for at least ``2 * num_ranks - 1`` micro-batches; with fewer, actions of micro-batches that do
    not exist are removed.
    """
    padded = max(num_microbatches, 2 * num_ranks - 1)
    programs = [_v_order(rank, num_ranks, padded) for rank in range(num_ranks)]
    kept = ([step for step in steps if step[2] < num_microbatches] for steps in programs)
    return Sections.flushing(map(rows_from_steps, kept))


def _v_order(rank: int, num_ranks: int, count: int) -> list[Step]:
    down, up, left = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    late = [(INPUT, down), (WEIGHT, down), (FORWARD, up), (INPUT, up), (WEIGHT, up)]
    return numbered([
        *[(FORWARD, down)] * (2 * left - 1),
        *[(FORWARD, up), (FORWARD, down)] * rank,
        *[(FORWARD, up), (INPUT, up), (WEIGHT, up)] * left,
        *[(FORWARD, down), *late] * (count - num_ranks - left + 1),
        *late * (left - 1),
        *[(INPUT, down), (INPUT, up)] * rank,
        *[(INPUT, down), (WEIGHT, down)] * left,
        *[(WEIGHT, up)] * rank,
        *[(WEIGHT, down)] * rank,
    ])  # fmt: skip
