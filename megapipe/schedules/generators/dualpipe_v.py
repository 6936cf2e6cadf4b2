"""DualPipeV: a V whose forwards and backwards run in pairs."""

from typing import Final

import numpy as np

from megapipe.schedules.actions import GROUP, KIND, MICROBATCH, STAGE, Kind, Rows
from megapipe.schedules.building_blocks import rows_from_steps, v_shape
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT, WEIGHT, numbered
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


Together = tuple[tuple[Kind, int], ...]
"""Kind and stage of the rows of one action."""
WEIGHT_HALF: Final = ((WEIGHT, -1),)
"""The weight half that waits longest, of whatever stage."""


def _rows(rank: int, num_ranks: int, count: int) -> Rows:
    """Return one rank's actions in DualPipe's eight phases."""
    down, up, ranks_after = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    forward_down, forward_up = ((FORWARD, down),), ((FORWARD, up),)
    down_and_up = (*forward_down, (Kind.BACKWARD, up))
    up_and_down = (*forward_up, (Kind.BACKWARD, down))
    # The last rank's first forward is of the micro-batch that it turns back first: nothing to overlap yet.
    turning = [down_and_up] if ranks_after else [(each,) for each in down_and_up]
    last = [up, down] * (rank + 1)
    return _numbered_rows([
        *[forward_down] * (2 * ranks_after),
        *[forward_down, forward_up] * (rank + 1),
        *[((INPUT, up),), WEIGHT_HALF, forward_up] * ranks_after,
        *turning,
        *[up_and_down, down_and_up] * (count - 2 * num_ranks + rank),
        up_and_down,
        *[((Kind.BACKWARD, up),), up_and_down] * ranks_after,
        *(((Kind.BACKWARD, stage),) for stage in last[: rank + 1]),
        *(((INPUT, stage),) for stage in last[rank + 1 :]),
        *[WEIGHT_HALF, ((INPUT, down),)] * ranks_after,
        *[WEIGHT_HALF] * (rank + 1),
    ])  # fmt: skip


def _numbered_rows(actions: list[Together]) -> Rows:
    """Return the rows of some actions, with their groups and micro-batches; weight halves in the order of their input
    halves."""
    kinds, stages = np.array([each for together in actions for each in together]).T
    # Whole backwards and halves of a stage count together.
    counted = np.where(kinds == INPUT, Kind.BACKWARD, kinds)
    rows = rows_from_steps(numbered(zip(counted, stages, strict=True)))
    rows[:, KIND] = kinds
    waiting = rows[kinds == INPUT]
    for column in (STAGE, MICROBATCH):
        rows[kinds == WEIGHT, column] = waiting[:, column]
    sizes = [len(together) for together in actions]
    groups = [number if size > 1 else -1 for number, size in enumerate(sizes)]
    rows[:, GROUP] = np.repeat(groups, sizes)
    return rows
