"""A schedule on ranks that share a machine: ranks that compute at the same time slow each other down.

`simulate` gives every rank a device of its own. Here the work of an action is the seconds that it takes alone, and
between two events the remaining work of every running action decreases by the time that passed, divided by the
slowdown for the number of busy ranks. This is processor sharing (Kleinrock 1976, Queueing Systems vol. 2, section
4.4), with a measured rate instead of an ideal one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, SENDS, SUMS_OF_RANKS, Kind
from megapipe.schedules.dependencies import Dependencies, awaited_rows
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.simulation.costs import Costs
from megapipe.schedules.simulation.simulate import Simulation
from megapipe.schedules.table import Table

TRAFFIC = (Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS, Kind.REDUCE_SCALARS)
"""Kinds that run one after another, overlapping with compute. The sum of scalars needs the sums of gradients before
it."""
WORK = (*COMPUTE_STREAM, Kind.UPDATE)
NEVER = float("inf")
ROUNDING = 1e-9
"""Fraction of an action's work that counts as none."""


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

    costs: seconds of each action when it runs alone. slowdown: number of busy ranks -> how many times longer work
    takes. processes: ranks of the run at each pipeline coordinate, which do the same at the same time. traffic_share:
    the part of a busy rank that a sum or gather takes while compute runs.

    Raises:
        ScheduleError: the schedule is not lowered, moves tensors to host memory, or deadlocks; or the costs have
            blocking sends.
    """
    if not schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} has only compute actions; lower it first")
    if costs.blocking_sends:
        raise ScheduleError("blocking sends are not simulated on ranks that share a machine; use `simulate`")
    table = Table.unroll(schedule, steps)
    if table.is_kind(Kind.OFFLOAD, Kind.RELOAD, Kind.SNAPSHOT).any():
        raise ScheduleError("copies to host memory are not simulated on ranks that share a machine; use `simulate`")
    durations = costs.durations(table)
    run = _Run(Dependencies(table), costs, durations.tolist(), slowdown, processes, traffic_share)
    run.to_the_end()
    cause = np.array(run.cause, dtype=np.int64)
    return Simulation(table, np.array(run.start), np.array(run.end), cause, durations > 0.0, durations)


@dataclass
class _Rank:
    """One pipeline rank: its next row, and those that run on its streams of compute and of traffic."""

    next: int
    last: int
    working: int = -1
    traffic: deque[int] = field(default_factory=deque)
    freed_by: int = -1


@dataclass
class _Run:
    """Simulation of ranks that share a machine; the arguments are those of `simulate_contended`."""

    dependencies: Dependencies
    costs: Costs
    durations: list[float]
    slowdown: Callable[[float], float]
    processes: int
    traffic_share: float

    def __post_init__(self) -> None:
        table, count = self.dependencies.table, len(self.durations)
        self._kind: list[int] = table.kind.tolist()
        self.start, self.end, self.cause = [NEVER] * count, [NEVER] * count, [-1] * count
        self._left = list(self.durations)
        self._awaits = awaited_rows(*self.dependencies.waits())
        self._link_of = self.dependencies.link_of_sends()
        self._link_free: dict[tuple[int, int], float] = {}
        self._ranks = [_Rank(first, last) for first, last in pairwise(table.offsets.tolist())]
        self._now = 0.0

    def to_the_end(self) -> None:
        """Compute the times of every row."""
        while True:
            # What starts may free another rank at the same moment.
            while any(self._advance(rank) for rank in self._ranks):
                pass
            busy = sum(rank.working >= 0 for rank in self._ranks)
            talking = sum(bool(rank.traffic) for rank in self._ranks)
            factor = self.slowdown(max(1.0, self.processes * (busy + self.traffic_share * talking)))
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
                self._left[row] = left if left > ROUNDING * self.durations[row] else 0.0
            self._finish()
        if any(rank.next < rank.last for rank in self._ranks):
            raise ScheduleError(f"{self.dependencies.table.header.name} deadlocks; validate it to see where it blocks")

    def _is_idle(self, rank: _Rank) -> bool:
        return rank.working < 0 and rank.next < rank.last

    def _finish(self) -> None:
        """End the rows without work left."""
        for rank in self._ranks:
            if rank.working >= 0 and self._left[rank.working] == 0.0:
                self.end[rank.working] = self._now
                rank.freed_by, rank.working = rank.working, -1
            while rank.traffic and self._left[rank.traffic[0]] == 0.0:
                row = rank.traffic.popleft()
                self.end[row] = self._now + (self._delay(row) if self._kind[row] in SUMS_OF_RANKS else 0.0)
                if rank.traffic:
                    self._open(rank.traffic[0])

    def _advance(self, rank: _Rank) -> bool:
        """Start a rank's next row if possible, and return whether it started."""
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
            self.end[row] = self._now + (self._delay(row) if kind in SUMS_OF_RANKS else 0.0)
        return True

    def _open(self, row: int) -> None:
        """Start the work of a row. The time of a collective is not work: it starts when all ranks have started it."""
        self.start[row] = self._now
        if self._kind[row] in SUMS_OF_RANKS:
            self._left[row] = 0.0

    def _ready(self, row: int) -> float:
        """Return the time at which all results for which the row waits are available; NEVER while it is unknown."""
        return max((self._result(other) for other in self._awaits.get(row, ())), default=0.0)

    def _result(self, row: int) -> float:
        """Return the time of a row's result; for collectives, that of this rank's own part."""
        return 0.0 if row < 0 else self.end[row]

    def _delay(self, row: int) -> float:
        """Return the time from a collective's last start to its result; the sum of scalars follows a tied one."""
        busy = self.slowdown(float(self.processes * len(self._ranks)))
        follows = self._kind[row] == Kind.REDUCE_TIED and self.dependencies.table.header.updates_per_step == 1
        after = self.costs.reduce_scalars if follows else 0.0
        return busy * (self.durations[row] + after)

    def _send(self, row: int) -> None:
        pair = self._link_of[row]
        link = self.costs.links.get(pair, self.costs.link)
        send_start = max(self._now, self._link_free.get(pair, 0.0))
        self._link_free[pair] = send_start + link.transfer
        self.start[row], self.end[row] = send_start, send_start + link.transfer + link.latency
