"""DualPipeV: a V whose forwards and backwards run in pairs."""

from collections import deque

from megapipe.schedules.actions import GROUP, Kind, Rows
from megapipe.schedules.building_blocks import Step, rows_from_steps, v_shape
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT, WEIGHT
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


def _require_two_a_rank(name: str, num_ranks: int, num_microbatches: int) -> None:
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"{name} needs at least 2 micro-batches a rank, {2 * num_ranks} with "
            f"{num_ranks} ranks, got {num_microbatches}; use more micro-batches, or zb_v"
        )


@schedule("dualpipe_v", "A", placement=v_shape, chunks=2, splits=True, check=_require_two_a_rank)
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Sections:
    """Two stages a rank in a V, where one micro-batch's forward and another's backward are one action, so that the
    communication of one hides behind the computation of the other (DualPipeV of DeepSeek's DualPipe, arXiv 2412.19437,
    section 3.2.1).

    Where a pair sends nothing before its end, the bubble is p - 1 chunks' forward, input half and weight half over 3
    times; p + 1/2 micro-batches are held.
    """
    return Sections.flushing(_rows(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _rows(rank: int, num_ranks: int, count: int) -> Rows:
    """Return one rank's actions in DualPipe's eight phases. Chunk 0 is on the way down, chunk 1 on the way up."""
    order, ranks_after = _Order(rank, num_ranks), num_ranks - 1 - rank
    for _ in range(2 * ranks_after):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(ranks_after):
        order.backward(1, half=True)
        order.weight_half()
        order.forward(1)
    for turn in range(count - 2 * num_ranks + rank + 1):
        # The last rank's first forward is of the micro-batch that it turns back first: nothing to overlap yet.
        order.pair(0, 1, overlapped=ranks_after > 0 or turn > 0)
        order.pair(1, 0)
    for _ in range(ranks_after):
        order.backward(1)
        order.pair(1, 0)
    middle, odd = (rank + 1) // 2, rank % 2 == 1
    for turn in range(rank + 1):
        order.backward(1, half=turn > middle or (turn == middle and odd))
        order.backward(0, half=turn >= middle)
    for _ in range(ranks_after):
        order.weight_half()
        order.backward(0, half=True)
    for _ in range(rank + 1):
        order.weight_half()
    return order.rows()


class _Order:
    """A rank's actions so far; each chunk counts its own micro-batches."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stages = rank, 2 * num_ranks - 1 - rank
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._waiting: deque[Step] = deque()
        self._steps: list[Step] = []
        self._groups: list[int] = []

    def rows(self) -> Rows:
        rows = rows_from_steps(self._steps)
        rows[:, GROUP] = self._groups
        return rows

    def forward(self, chunk: int, group: int = -1) -> None:
        self._add((FORWARD, self._stages[chunk], self._forwards[chunk]), group)
        self._forwards[chunk] += 1

    def backward(self, chunk: int, group: int = -1, *, half: bool = False) -> None:
        stage, microbatch = self._stages[chunk], self._backwards[chunk]
        self._add((INPUT if half else Kind.BACKWARD, stage, microbatch), group)
        self._backwards[chunk] += 1
        if half:
            self._waiting.append((WEIGHT, stage, microbatch))

    def weight_half(self) -> None:
        self._add(self._waiting.popleft(), -1)

    def pair(self, forward: int, backward: int, *, overlapped: bool = True) -> None:
        group = len(self._steps) if overlapped else -1
        self.forward(forward, group)
        self.backward(backward, group)

    def _add(self, step: Step, group: int) -> None:
        self._steps.append(step)
        self._groups.append(group)
