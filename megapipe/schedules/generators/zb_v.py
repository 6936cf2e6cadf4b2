"""ZB-V: two stages on each rank, down the ranks and back up."""

from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import Step, rows_from_steps, v_shape
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT, WEIGHT
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
    down, up = rank, 2 * num_ranks - 1 - rank
    ranks_left = num_ranks - rank
    order = _Counter()
    order.add((FORWARD, down), times=2 * ranks_left - 1)
    order.add((FORWARD, up), (FORWARD, down), times=rank)
    order.add((FORWARD, up), (INPUT, up), (WEIGHT, up), times=ranks_left)
    while order.count(FORWARD, up) < count:
        if order.count(FORWARD, down) < count:
            order.add((FORWARD, down))
        order.add((INPUT, down), (WEIGHT, down), (FORWARD, up), (INPUT, up), (WEIGHT, up))
    order.add((INPUT, down), (INPUT, up), times=rank)
    order.add((INPUT, down), (WEIGHT, down), times=ranks_left)
    order.add((WEIGHT, up), times=count - order.count(WEIGHT, up))
    order.add((WEIGHT, down), times=count - order.count(WEIGHT, down))
    return order.steps


class _Counter:
    """Steps in order, each kind and stage counting its own micro-batches."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._next: dict[tuple[Kind, int], int] = {}

    def count(self, kind: Kind, stage: int) -> int:
        return self._next.get((kind, stage), 0)

    def add(self, *group: tuple[Kind, int], times: int = 1) -> None:
        """Append the group ``times`` times."""
        for _ in range(times):
            for kind, stage in group:
                self.steps.append((kind, stage, self.count(kind, stage)))
                self._next[kind, stage] = self.count(kind, stage) + 1
