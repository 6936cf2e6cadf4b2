"""The schedules of the races, and the step time that the order of each one allows."""

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
"""Actions that every contestant runs. Its processor time is divided by their number."""

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}

TorchOrder = Mapping[int, Iterable[Any]]
"""Compute actions by rank, as torch.distributed.pipelining lists them; None is an idle slot."""


@dataclass(frozen=True)
class Race:
    """A schedule and the class of torch.distributed.pipelining that runs it. chunks: stages on each rank."""

    name: str
    peer: type
    chunks: int = 1

    @property
    def takes_torch_order(self) -> bool:
        """Whether megapipe runs torch's order, because it does not have a generator of this name."""
        return self.peer is peer.ScheduleInterleavedZeroBubble

    @property
    def takes_halves(self) -> bool:
        """Whether the schedule splits backwards into two halves."""
        return self.name in ("interleaved_zero_bubble", "zb_v", "dualpipe_v")

    def stages_on(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
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
    """Return the schedule that megapipe and the bare loops run."""
    if not race.takes_torch_order:
        return build(race.name, num_ranks, num_microbatches)
    assert torch_order is not None
    header = order("interleaved_1f1b", num_ranks, num_microbatches).header
    body = tuple(rows_of(*_columns(torch_order[rank])) for rank in range(num_ranks))
    return lower(Schedule(replace(header, name=race.name), Sections.flushing(body)))


def _columns(actions: Iterable[Any]) -> tuple[Any, ...]:

    rows = [
        (_KINDS[str(a.computation_type.value)], a.stage_index, a.microbatch_index) for a in actions if a is not None
    ]
    return tuple(np.array(rows).T)


def actions_of(schedule: Schedule, rank: int) -> int:
    """Return the number of counted actions of one step on a rank."""
    return sum(action.kind in COUNTED for action in schedule.actions("body", rank))


def finish(schedule: Schedule, seconds: float, *, torch_halves: bool = False) -> float:
    """Return the time of a step if only stages took time: `seconds` for a forward and for each half of a backward.

    torch_halves: whether the weight half of the first stage's backward takes the time of both halves, as in torch.
    """
    chunks = len(schedule.header.stages_on(0))
    costs = rank_costs(schedule.header, forward=seconds * chunks)
    if torch_halves:
        first = {Kind.BACKWARD_INPUT: 0.0, Kind.BACKWARD_WEIGHT: 2.0 * seconds}
        costs = costs.with_times({CostPlace(kind, 0): time for kind, time in first.items()})
    return simulate(schedule, costs).finish
