"""Which schedules compete, and the step time that each one's order allows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.pipelining import schedules as peer

from megapipe.schedules import Schedule, Sections, build, lower, order, rank_costs, simulate
from megapipe.schedules.actions import Kind, rows_of
from megapipe.schedules.simulation import CostPlace

COUNTED = (
    *(Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    *(Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT),
)
"""Actions that every contestant runs; its processor time is shared among these."""

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}

TorchOrder = Mapping[int, Iterable[Any]]
"""Compute actions by rank, as torch.distributed.pipelining has them; None marks an idle place."""


@dataclass(frozen=True)
class Race:
    """A schedule and the class of torch.distributed.pipelining that runs it. chunks: stages on each rank."""

    name: str
    peer: type
    chunks: int = 1

    @property
    def takes_torch_order(self) -> bool:
        """megapipe has no generator of this name; it runs torch's own order."""
        return self.peer is peer.ScheduleInterleavedZeroBubble

    @property
    def takes_halves(self) -> bool:
        """Its backwards are split."""
        return self.name in ("interleaved_zero_bubble", "zb_v", "dualpipe_v")

    def stages_on(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        if self.peer in (peer.ScheduleZBVZeroBubble, peer.ScheduleDualPipeV):
            return rank, 2 * num_ranks - 1 - rank
        return tuple(range(rank, num_ranks * self.chunks, num_ranks))


RACES = {
    race.name: race
    for race in (
        Race("gpipe", peer.ScheduleGPipe),
        Race("1f1b", peer.Schedule1F1B),
        Race("interleaved_1f1b", peer.ScheduleInterleaved1F1B, 2),
        Race("interleaved_zero_bubble", peer.ScheduleInterleavedZeroBubble, 2),
        Race("zb_v", peer.ScheduleZBVZeroBubble, 2),
        Race("dualpipe_v", peer.ScheduleDualPipeV, 2),
    )
}


def lowered(race: Race, num_ranks: int, num_microbatches: int, torch_order: TorchOrder | None) -> Schedule:
    """The schedule that megapipe and the bare loops run."""
    if not race.takes_torch_order:
        return build(race.name, num_ranks, num_microbatches)
    assert torch_order is not None
    header = order("interleaved_1f1b", num_ranks, num_microbatches).header
    body = tuple(rows_of(*_columns(torch_order[rank])) for rank in range(num_ranks))
    return lower(Schedule(replace(header, name=race.name), Sections.flushing(body)))


def _columns(actions: Iterable[Any]) -> tuple[Any, ...]:

    found = [
        (_KINDS[str(a.computation_type.value)], a.stage_index, a.microbatch_index) for a in actions if a is not None
    ]
    return tuple(np.array(found).T)


def actions_of(schedule: Schedule, rank: int) -> int:
    """Counted actions of one step on a rank."""
    return sum(action.kind in COUNTED for action in schedule.actions("body", rank))


def finish(schedule: Schedule, seconds: float, *, torch_halves: bool = False) -> float:
    """Step time from a common start if only stages took time: forward `seconds`, backward twice that, each half once.

    torch_halves: as torch runs them: all of the first stage's backward in its weight half.
    """
    chunks = len(schedule.header.stages_on(0))
    costs = rank_costs(schedule.header, forward=seconds * chunks)
    if torch_halves:
        first = {Kind.BACKWARD_INPUT: 0.0, Kind.BACKWARD_WEIGHT: 2.0 * seconds}
        costs = costs.with_times({CostPlace(kind, 0): time for kind, time in first.items()})
    return simulate(schedule, costs).finish
