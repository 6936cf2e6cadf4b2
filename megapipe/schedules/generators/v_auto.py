"""The automatic schedule in a V: the cheapest of many building blocks under a memory limit."""

import math
from collections.abc import Iterator
from itertools import product

from megapipe.schedules.building_blocks import (
    EQUAL_TIMES,
    Timed,
    Times,
    cheapest,
    fill_idle_time,
    most_held,
    steps_of,
    v_shape,
)
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators._zero_bubble import PERIOD, BuildingBlock, filled
from megapipe.schedules.generators.zb_v import zb_v
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections

SLOPES = (1, 2)
"""Units from a rank to the next one. With larger slopes, ranks hold more, and no faster order was found."""


@schedule("v_auto", "A", placement=v_shape, chunks=2, splits=True)
def v_auto(
    num_ranks: int, num_microbatches: int, *, memory_limit: float | None = None, times: Times = EQUAL_TIMES
) -> Sections:
    """The cheapest order in a V that is found for given times and memory (among building blocks of arXiv 2405.15362,
    section 2, and ZB-V's order).

    ``memory_limit`` is the maximum number of micro-batches that a rank holds between forward and weight half,
    ``num_ranks`` by default (that is 1F1B's memory); V-Min's floor((p + 4) / 3) is the least.
    """
    least = (num_ranks + 4) // 3
    limit = float(max(num_ranks, least)) if memory_limit is None else memory_limit
    if not least <= limit < math.inf:
        raise ScheduleError(
            f"memory_limit is {limit:g}; with {num_ranks} ranks it must "
            f"be a finite number of at least {least}, which V-Min holds"
        )
    return cheapest(_candidates(num_ranks, num_microbatches, int(2 * limit), times))


def _candidates(num_ranks: int, num_microbatches: int, limit: int, times: Times) -> Iterator[Timed]:
    """Yield orders that hold at most ``limit`` chunks. The order of V-Min is always one of them."""
    programs = tuple(map(steps_of, zb_v(num_ranks, num_microbatches).body))
    orders = [fill_idle_time(programs, v_shape(num_ranks, 2), times, None)]
    for down, up, *turns in product(SLOPES, SLOPES, *[range(PERIOD)] * 3):
        block = BuildingBlock(down, up, (turns[0], turns[1], turns[2]))
        if block.repeats(num_ranks):
            orders.append(filled(num_ranks, num_microbatches, block, limit, times))
    return (each for each in orders if max(map(most_held, each.programs)) <= limit)
