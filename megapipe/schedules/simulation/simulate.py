"""Event-driven simulation of lowered schedules: the start and end of each action, and the bubbles that follow."""

from dataclasses import dataclass

import numpy as np

from megapipe.schedules.actions import (
    COMPUTE_STREAM,
    RECEIVES,
    SENDS,
    SUMS_OF_RANKS,
    VERSION,
    Floats,
    Ints,
    Kind,
    Mask,
)
from megapipe.schedules.dependencies import Dependencies, Needs, awaited_rows, joined
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.memory import peak_activations, pending_weight_halves
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.simulation.costs import Costs
from megapipe.schedules.table import Table


class _Clocks:
    """Clocks of the streams of all ranks, and the rows for which each row waits."""

    def __init__(self, dependencies: Dependencies, costs: Costs, durations: Floats) -> None:
        table, messages = dependencies.table, dependencies.messages
        num_rows, num_ranks = len(table.rows), table.header.num_ranks
        self.start, self.end, self.cause = [0.0] * num_rows, [0.0] * num_rows, [-1] * num_rows
        self._done = [False] * num_rows
        self._kind: list[int] = table.kind.tolist()
        self._duration: list[float] = durations.tolist()
        self._blocking = costs.blocking_sends
        # If a step has several updates, none waits for the scalars.
        self._scalars = costs.reduce_scalars if table.header.updates_per_step == 1 else 0.0
        gathers = table.rows_with(Kind.GATHER_WEIGHTS)
        from_host = table.header.host_weights[table.stage[gathers], table.unit[gathers]]
        self._from_host = set(gathers[from_host].tolist())
        waits = dependencies.waits()
        if self._blocking:
            waits = joined(waits, Needs(messages.send, messages.receive))
        # A group starts when all of its rows can.
        self._awaits = awaited_rows(table.action_first[waits.row], waits.needed)
        self._link_of = dependencies.link_of_sends()
        self._links = {pair: costs.links.get(pair, costs.link) for pair in set(self._link_of.values())}
        self._link_free = dict.fromkeys(self._links, (0.0, -1))
        self._compute, self._data_parallel, self._copied_out, self._offloaded, self._copied_in = (
            [(0.0, -1)] * num_ranks for _ in range(5)
        )
        self._streams: dict[int, list[tuple[float, int]]] = {
            Kind.GATHER_WEIGHTS: self._data_parallel,
            Kind.REDUCE_GRADIENTS: self._data_parallel,
            Kind.SNAPSHOT: self._copied_out,
        }
        self._table = table
        self._collectives = dependencies.collective_needs()

    def run(self) -> None:
        """Compute the times of every row."""
        next_row, last_row = self._table.offsets[:-1].tolist(), self._table.offsets[1:].tolist()
        moved = True
        while moved:
            before = list(next_row)
            for rank, (row, last) in enumerate(zip(before, last_row, strict=True)):
                while row < last and self.ready(row):
                    self.take(rank, row)
                    row += 1
                next_row[rank] = row
            moved = next_row != before
        if next_row != last_row:
            raise ScheduleError(f"{self._table.header.name} deadlocks; validate it to see where it blocks")
        self.close_collectives()

    def ready(self, row: int) -> bool:
        """Return whether all rows for which this row waits have their times."""
        return row not in self._awaits or all(self._done[other] for other in self._awaits[row])

    def take(self, rank: int, row: int) -> None:
        """Set the times of the row, and advance the stream of its rank."""
        kind = self._kind[row]
        self._done[row] = True
        if kind in SENDS:
            self._send(rank, row)
        elif kind in self._streams:
            stream = self._copied_in if row in self._from_host else self._streams[kind]
            stream[rank] = self._put(row, self._compute[rank], stream[rank])
        elif kind in (*SUMS_OF_RANKS, *RECEIVES, Kind.RELEASE_WEIGHTS):
            # A collective is ready here; it ends for those who await it, when the last rank is ready.
            gradient_sums = [self._data_parallel[rank]] if kind == Kind.REDUCE_SCALARS else []
            self.start[row], self.cause[row] = max([self._compute[rank], *gradient_sums])
            self.end[row] = self.start[row]
        elif kind == Kind.OFFLOAD:
            self._offload(rank, row)
        elif kind == Kind.RELOAD:
            self._reload(rank, row)
        else:
            self._compute[rank] = self._put(row, self._compute[rank], *self._awaited(row))

    def _put(self, row: int, *after: tuple[float, int]) -> tuple[float, int]:
        """Start a row after the latest of some (time, row), and return (end of the row, row)."""
        self.start[row], self.cause[row] = max(after)
        self.end[row] = self.start[row] + self._duration[row]
        return self.end[row], row

    def _awaited(self, row: int) -> list[tuple[float, int]]:
        """Return (time, row) for each awaited row: the arrival of its message, or the end of its collective."""
        return [(self.end[other] + self._delay(other), other) for other in self._awaits.get(row, ())]

    def _delay(self, row: int) -> float:
        """Return the time from a collective's start on its last rank to its result; the sum of scalars follows a tied
        one."""
        if self._kind[row] == Kind.REDUCE_TIED:
            return self._duration[row] + self._scalars
        return self._duration[row] if self._kind[row] in SUMS_OF_RANKS else 0.0

    def _offload(self, rank: int, row: int) -> None:
        """Let one tensor leave at a time: compute waits until the tensor before it has left, and then uses its
        memory."""
        self._compute[rank] = max(self._compute[rank], self._offloaded[rank])
        self._copied_out[rank] = self._put(row, self._compute[rank], self._copied_out[rank])
        self._offloaded[rank] = self._copied_out[rank]

    def _reload(self, rank: int, row: int) -> None:
        """Let copies arrive one after another. Compute waits for the last offload if this reload brings the same
        tensor back, or brings back a state, which needs the memory of the state that left before it."""
        last = self._offloaded[rank][1]
        rows = self._table.rows
        if last >= 0 and (rows[row, VERSION] >= 0 or np.array_equal(rows[row, 1:], rows[last, 1:])):
            self._compute[rank] = max(self._compute[rank], self._offloaded[rank])
        self._copied_in[rank] = self._put(row, self._compute[rank], self._copied_in[rank])

    def _send(self, rank: int, row: int) -> None:
        pair = self._link_of[row]
        link = self._links[pair]
        earlier = self._compute[rank], self._link_free[pair], *self._awaited(row)
        send_start, self.cause[row] = max(earlier, key=lambda each: each[0])
        self.start[row] = send_start
        self._link_free[pair] = (send_start + link.transfer, row)
        self.end[row] = send_start + link.transfer + link.latency
        if self._blocking:
            self._compute[rank] = (self.end[row], row)

    def close_collectives(self) -> None:
        """Let each collective end, on every rank, when those who await it get its result.

        Sums of gradients over the holders of a part have ended on their rank's stream, and the scalars follow them.
        """
        pairs = [
            (row, member)
            for row, member in zip(self._collectives.row.tolist(), self._collectives.needed.tolist(), strict=True)
            if self._kind[member] in SUMS_OF_RANKS
        ]
        done: dict[int, float] = {}
        for row, member in pairs:
            done[row] = max(done.get(row, 0.0), self.start[member] + self._delay(member))
        for row, member in pairs:
            tied = self._kind[member] == Kind.REDUCE_TIED
            self.end[member] = max(self.end[member], done[row] - (self._scalars if tied else 0.0))


@dataclass(frozen=True)
class Simulation:
    """The simulated steps.

    ``start`` and ``end`` give each row of ``table`` its time: a send ends when its message has arrived, a receive when
    it is posted, a reduction when its result is available. ``cause`` is the row whose end let it start, -1 for none.
    """

    table: Table
    start: Floats
    end: Floats
    cause: Ints
    working: Mask
    durations: Floats

    @property
    def finish(self) -> float:
        """End of the last rank."""
        return float(self.end[self.working].max(initial=0.0))

    @property
    def makespan(self) -> float:
        """Longest time on any one rank from its first forward's start to the end of its last action that takes time
        (the cost of the zero-bubble paper, arXiv 2401.10241: waiting for the first forward does not count, nor does a
        pass of a shard before it that takes no time)."""
        spans, forwards = [], self.table.is_kind(Kind.FORWARD)
        forwards &= self.working | ~self.table.header.is_shard[self.table.stage]
        for first, last in zip(self.table.offsets, self.table.offsets[1:], strict=False):
            working = self.working[first:last]
            first_forward = self.start[first:last][forwards[first:last]].min(initial=np.inf)
            if working.any():
                spans.append(float(self.end[first:last][working].max() - first_forward))
        return max(spans, default=0.0)

    @property
    def ideal(self) -> float:
        """Compute time of the busiest rank: no schedule of the same work ends earlier."""
        compute = self.table.is_kind(*COMPUTE_STREAM)
        weights = np.where(compute, self.durations, 0.0)
        return float(np.bincount(self.table.rank, weights, minlength=1).max())

    @property
    def bubble(self) -> float:
        """Idle time as a part of the ideal time, without the wait for the first forward: ``makespan / ideal - 1``."""
        return self.makespan / self.ideal - 1.0

    @property
    def idle(self) -> float:
        """All idle time of the busiest rank as a part of the ideal time, the waits before its first forward and after
        its last action included: ``finish / ideal - 1``."""
        return self.finish / self.ideal - 1.0

    @property
    def bubble_rate(self) -> float:
        """Idle time as a part of the makespan: ``1 - ideal / makespan``."""
        return 1.0 - self.ideal / self.makespan

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak number of activations per rank, in micro-batches of the whole rank's layers."""
        return peak_activations(self.table)

    @property
    def pending_weight_halves(self) -> tuple[float, ...]:
        """Peak number of waiting weight halves per rank, in micro-batches of the whole rank's layers."""
        return pending_weight_halves(self.table)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Copies of the weights per rank."""
        return self.table.header.weight_versions

    @property
    def weight_gathers(self) -> tuple[int, ...]:
        """Gathers of a unit's weights per rank, over all steps."""
        ranks = self.table.rank[self.table.rows_with(Kind.GATHER_WEIGHTS)]
        return tuple(np.bincount(ranks, minlength=self.table.header.num_ranks).tolist())

    def critical_path(self) -> list[int]:
        """Return the rows of ``table`` on which the finish depends, first to last."""
        row = int(np.argmax(np.where(self.working, self.end, -np.inf)))
        path = []
        while row >= 0:
            path.append(row)
            row = int(self.cause[row])
        return path[::-1]


def simulate(schedule: Schedule, costs: Costs, steps: int = 1) -> Simulation:
    """Run ``steps`` optimizer steps of a lowered schedule with the given times.

    Raises ScheduleError if the schedule is not lowered, or if its ranks wait for each other in a cycle.

    Example:
        >>> from megapipe import build, rank_costs, simulate
        >>> schedule = build("1f1b", 2, 4)
        >>> simulate(schedule, rank_costs(schedule.header)).finish
        15.0
    """
    if not schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} has only compute actions; lower it first")
    table = Table.unroll(schedule, steps)
    durations = costs.durations(table)
    clocks = _Clocks(Dependencies(table), costs, durations)
    clocks.run()
    cause = np.array(clocks.cause, dtype=np.int64)
    return Simulation(table, np.array(clocks.start), np.array(clocks.end), cause, durations > 0.0, durations)
