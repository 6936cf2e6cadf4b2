"""A schedule on ranks that share a machine: who computes at once goes slower.

The simulator of `schedules` gives every rank a device of its own. Here work is a fluid: an action has as much of it as
seconds it takes by itself, and between two events every action under way loses the time that passed over the slowdown
of as many busy ranks (`Measurements.slowdown`). That is processor sharing (Kleinrock 1976, Queueing Systems vol. 2,
section 4.4), with a measured rate in place of an ideal one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from megapipe.layout.hardware.description import IntraNodeLink
from megapipe.layout.hardware.measured import Measurements
from megapipe.schedules import Costs, Schedule, ScheduleError, Simulation
from megapipe.schedules.actions import COMPUTE_STREAM, Kind
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.simulation.run import Durations
from megapipe.schedules.table import Table

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
TRAFFIC = (Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS, Kind.REDUCE_SCALARS)
"""One behind the other beside compute; the sum of scalars needs those of gradients before it."""
COLLECTIVES = (Kind.REDUCE_TIED, Kind.REDUCE_SCALARS, Kind.REDUCE_COUNTS)
WORK = (*COMPUTE_STREAM, Kind.UPDATE)
NEVER = float("inf")
ROUNDING = 1e-9
"""Of an action's work: less than that is none."""


def simulate_contended(
    schedule: Schedule,
    costs: Costs,
    slowdown: Callable[[float], float],
    *,
    processes: int = 1,
    traffic_share: float = 1.0,
    steps: int = 1,
) -> Simulation:
    """Run `steps` steps of a lowered schedule on ranks that share a machine.

    costs: seconds of everything by itself. slowdown: number of busy ranks -> how many times longer work takes.
    processes: ranks of the run that stand behind each pipeline rank and do the same at the same time. traffic_share:
    of a busy rank, what a sum or gather takes beside compute.

    Raises:
        ScheduleError: the schedule is not lowered, moves tensors to host memory, or deadlocks; blocking sends.
    """
    if not schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} has only compute actions; lower it before simulating it")
    if costs.blocking_sends:
        raise ScheduleError("blocking sends are not simulated on ranks that share a machine; use `simulate`")
    table = Table.unroll(schedule, steps)
    if table.is_kind(Kind.OFFLOAD, Kind.RELOAD).any():
        raise ScheduleError("copies to host memory are not simulated on ranks that share a machine; use `simulate`")
    durations = Durations.of(table, costs).of_row
    run = _Run(Dependencies(table), costs, durations.tolist(), slowdown, processes, traffic_share)
    run.to_the_end()
    return Simulation(
        table, np.array(run.start), np.array(run.end), np.array(run.cause, dtype=np.int64), durations > 0.0, durations
    )


def simulate_measured(
    schedule: Schedule,
    costs: Costs,
    measured: Measurements,
    *,
    processes: int,
    traffic_share: float,
    steps: int = 1,
) -> Simulation:
    """`simulate_contended` with a machine's own figures; every action takes what the engine takes around it too."""

    def with_engine(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(each + measured.action_seconds if each > 0 else each for each in seconds)

    costs = replace(
        costs,
        forward=with_engine(costs.forward),
        recompute=with_engine(costs.recompute),
        backward=with_engine(costs.backward),
        backward_input=with_engine(costs.backward_input),
        backward_weight=with_engine(costs.backward_weight),
    )
    return simulate_contended(
        schedule, costs, measured.slowdown, processes=processes, traffic_share=traffic_share, steps=steps
    )


def traffic_share(link: IntraNodeLink, replicas: int) -> float:
    """Of a busy rank, what a sum of gradients over that many replicas takes: as measured, a whole one if not."""
    row = link.measured("all_reduce", replicas)
    return 1.0 if row is None else row.busy


@dataclass
class _Rank:
    """One pipeline rank: what is next, what is under way on its compute stream and on its traffic's."""

    next: int
    last: int
    working: int = -1
    traffic: deque[int] = field(default_factory=deque)
    freed_by: int = -1


class _Run:
    def __init__(
        self,
        dependencies: Dependencies,
        costs: Costs,
        durations: list[float],
        slowdown: Callable[[float], float],
        processes: int,
        traffic_share: float,
    ) -> None:
        table, messages = dependencies.table, dependencies.messages
        count = len(table.rows)
        self._table, self._costs, self._durations = table, costs, durations
        self._slowdown, self._processes, self._share = slowdown, processes, traffic_share
        self._kind: list[int] = table.kind.tolist()
        self.start, self.end, self.cause = [NEVER] * count, [NEVER] * count, [-1] * count
        self._left = list(durations)
        self._awaits: dict[int, list[int]] = {}
        for rows, needed in (
            (messages.use, messages.send),
            (dependencies.gathers.row, dependencies.gathers.needed),
            (dependencies.gradient_buffers.row, dependencies.gradient_buffers.needed),
            (dependencies.reduced.row, dependencies.reduced.needed),
        ):
            self._note(rows.tolist(), needed.tolist())
        collectives = dependencies.collective_needs()
        self._note(collectives.row.tolist(), collectives.needed.tolist())
        ranks = table.rank
        self._link_of = {
            send: (int(ranks[send]), int(ranks[receive]))
            for send, receive in zip(messages.send.tolist(), messages.receive.tolist(), strict=True)
        }
        self._link_free: dict[tuple[int, int], float] = {}
        offsets = table.offsets.tolist()
        self._ranks = [_Rank(first, last) for first, last in pairwise(offsets)]
        self._now = 0.0

    def _note(self, rows: list[int], needed: list[int]) -> None:
        for row, other in zip(rows, needed, strict=True):
            if row != other:
                self._awaits.setdefault(row, []).append(other)

    def to_the_end(self) -> None:
        """Give every row its times."""
        while True:
            self._begin_all()
            busy = sum(rank.working >= 0 for rank in self._ranks)
            talking = sum(bool(rank.traffic) for rank in self._ranks)
            factor = self._slowdown(max(1.0, self._processes * (busy + self._share * talking)))
            under_way = [rank.working for rank in self._ranks if rank.working >= 0]
            under_way += [rank.traffic[0] for rank in self._ranks if rank.traffic]
            arrival = min((self._ready(rank.next) for rank in self._ranks if self._is_idle(rank)), default=NEVER)
            done = min((self._now + self._left[row] * factor for row in under_way), default=NEVER)
            following = min(arrival, done)
            if following == NEVER:
                break
            passed = (following - self._now) / factor
            self._now = following
            for row in under_way:
                left = self._left[row] - passed
                self._left[row] = left if left > ROUNDING * self._durations[row] else 0.0
            self._finish()
        if any(rank.next < rank.last for rank in self._ranks):
            raise ScheduleError(f"{self._table.header.name} deadlocks; validate it to see where it blocks")

    def _begin_all(self) -> None:
        """Begin whatever can begin now; what begins may free another rank at the same moment."""
        moved = True
        while moved:
            moved = any(self._advance(rank) for rank in self._ranks)

    def _is_idle(self, rank: _Rank) -> bool:
        return rank.working < 0 and rank.next < rank.last

    def _finish(self) -> None:
        """End what has no work left."""
        for rank in self._ranks:
            if rank.working >= 0 and self._left[rank.working] == 0.0:
                self.end[rank.working] = self._now
                rank.freed_by, rank.working = rank.working, -1
            while rank.traffic and self._left[rank.traffic[0]] == 0.0:
                row = rank.traffic.popleft()
                self.end[row] = self._now + (self._delay(row) if self._kind[row] in COLLECTIVES else 0.0)
                if rank.traffic:
                    self._open(rank.traffic[0])

    def _advance(self, rank: _Rank) -> bool:
        """Begin a rank's next row, if it can; whether it did."""
        row = rank.next
        if not self._is_idle(rank) or self._ready(row) > self._now:
            return False
        kind = self._kind[row]
        rank.next += 1
        self.cause[row] = max([rank.freed_by, *self._awaits.get(row, ())], key=self._result)
        if kind in WORK:
            self._open(row)
            rank.working = row
            self._finish()
        elif kind in TRAFFIC:
            rank.traffic.append(row)
            if len(rank.traffic) == 1:
                self._open(row)
            self._finish()
        elif kind in SENDS:
            self._send(row)
        else:
            self.start[row] = self._now
            self.end[row] = self._now + (self._delay(row) if kind in COLLECTIVES else 0.0)
        return True

    def _open(self, row: int) -> None:
        """Its work begins now. What collectives take follows once all ranks are there: it is no work of this one."""
        self.start[row] = self._now
        if self._kind[row] in COLLECTIVES:
            self._left[row] = 0.0

    def _ready(self, row: int) -> float:
        """When all that the row awaits is there; NEVER while that is not known."""
        return max((self._result(other) for other in self._awaits.get(row, ())), default=0.0)

    def _result(self, row: int) -> float:
        """When a row's result is there: of collectives a member's own part."""
        return 0.0 if row < 0 else self.end[row]

    def _delay(self, row: int) -> float:
        """From a collective's start on its last rank to the result; the sum of scalars follows a tied one."""
        busy = self._slowdown(float(self._processes * len(self._ranks)))
        follows = self._kind[row] == Kind.REDUCE_TIED and self._table.header.updates_per_step == 1
        after = self._costs.reduce_scalars if follows else 0.0
        return busy * (self._durations[row] + after)

    def _send(self, row: int) -> None:
        pair = self._link_of[row]
        link = self._costs.links.get(pair, self._costs.link)
        begin = max(self._now, self._link_free.get(pair, 0.0))
        self._link_free[pair] = begin + link.transfer
        self.start[row], self.end[row] = begin, begin + link.transfer + link.latency
