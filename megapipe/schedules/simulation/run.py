"""The simulator's loop: ranks run their rows in order, each until it waits for a row of another rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import VERSION, Kind
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.offload import states_moved
from megapipe.schedules.simulation.costs import Costs
from megapipe.schedules.table import Table


@dataclass(frozen=True)
class Durations:
    """Time of every row on its rank's compute stream, or on its own stream for communication; shape [rows]."""

    of_row: npt.NDArray[np.float64]

    @classmethod
    def of(cls, table: Table, costs: Costs) -> "Durations":
        """The rows' times: a unit takes its equal part of the chunk, a state unit its part of the stage's update."""
        by_kind = np.zeros((len(Kind), table.num_stages))
        for kind, times in (
            (Kind.FORWARD, costs.forward),
            (Kind.RECOMPUTE, costs.recompute),
            (Kind.BACKWARD, costs.backward),
            (Kind.BACKWARD_INPUT, costs.backward_input),
            (Kind.BACKWARD_WEIGHT, costs.backward_weight),
            (Kind.REDUCE_GRADIENTS, costs.reduce_gradients),
            (Kind.GATHER_WEIGHTS, costs.gather_weights),
            (Kind.UPDATE, costs.update),
        ):
            by_kind[kind] = times
        by_kind[Kind.REDUCE_TIED] = costs.reduce_tied
        by_kind[Kind.REDUCE_SCALARS] = costs.reduce_scalars
        by_kind[[Kind.OFFLOAD, Kind.RELOAD]] = costs.offload or 0.0
        parts = np.where(table.unit >= 0, table.units, 1)
        states = np.array([len(table.header.state_units(stage)) for stage in range(table.num_stages)])
        parts = np.where(table.is_kind(Kind.UPDATE), states[table.stage], parts)
        parts = np.where(table.is_kind(Kind.REDUCE_TIED, Kind.REDUCE_SCALARS), 1, parts)
        of_row = by_kind[table.kind, table.stage] / parts
        moved = np.concatenate([states_moved(table, Kind.OFFLOAD), states_moved(table, Kind.RELOAD)])
        by_stage = np.array(costs.offload_state or (0.0,) * table.num_stages)
        of_row[moved] = (by_stage / states)[table.stage[moved]]
        return cls(of_row)


@dataclass(frozen=True)
class Timeline:
    """Start, end and cause of every row."""

    start: list[float]
    end: list[float]
    cause: list[int]


def run(dependencies: Dependencies, costs: Costs, durations: Durations) -> Timeline:
    """Times of every row of a table."""
    table = dependencies.table
    clocks = _Clocks(dependencies, costs, durations)
    next_row, last_row = table.offsets[:-1].tolist(), table.offsets[1:].tolist()
    moved = True
    while moved:
        moved = False
        for rank, (row, last) in enumerate(zip(list(next_row), last_row, strict=True)):
            at = row
            while at < last and clocks.ready(at):
                clocks.take(rank, at)
                at += 1
            moved = moved or at > row
            next_row[rank] = at
    if next_row != last_row:
        raise ScheduleError(f"{table.header.name} deadlocks; validate it to see where it blocks")
    clocks.close_collectives()
    return Timeline(clocks.start, clocks.end, clocks.cause)


class _Clocks:
    """Streams of all ranks, and what each row waits for."""

    def __init__(self, dependencies: Dependencies, costs: Costs, durations: Durations) -> None:
        table, messages = dependencies.table, dependencies.messages
        num_rows, num_ranks = len(table.rows), table.header.num_ranks
        self.start, self.end, self.cause = [0.0] * num_rows, [0.0] * num_rows, [-1] * num_rows
        self._done = [False] * num_rows
        self._kind: list[int] = table.kind.tolist()
        self._duration: list[float] = durations.of_row.tolist()
        self._blocking = costs.blocking_sends
        # Of several updates in a step none waits for the scalars.
        self._scalars = costs.reduce_scalars if table.header.updates_per_step == 1 else 0.0
        self._weights_in_host = table.header.weights_in_host
        self._awaits: dict[int, list[int]] = {}
        self._note_waits(messages.use.tolist(), messages.send.tolist())
        if self._blocking:
            self._note_waits(messages.send.tolist(), messages.receive.tolist())
        self._note_waits(dependencies.gathers.row.tolist(), dependencies.gathers.needed.tolist())
        self._note_waits(dependencies.gradient_buffers.row.tolist(), dependencies.gradient_buffers.needed.tolist())
        self._note_waits(dependencies.reduced.row.tolist(), dependencies.reduced.needed.tolist())
        self._note_waits(dependencies.reloads.row.tolist(), dependencies.reloads.needed.tolist())
        collectives = dependencies.collective_needs()
        self._note_waits(collectives.row.tolist(), collectives.needed.tolist())
        self._link_of = dict(
            zip(
                messages.send.tolist(),
                zip(table.rank[messages.send].tolist(), table.rank[messages.receive].tolist(), strict=True),
                strict=True,
            )
        )
        self._links = {pair: costs.links.get(pair, costs.link) for pair in set(self._link_of.values())}
        self._link_free = dict.fromkeys(self._links, (0.0, -1))
        self._compute = [(0.0, -1)] * num_ranks
        self._data_parallel = [(0.0, -1)] * num_ranks
        self._copied_out = [(0.0, -1)] * num_ranks
        self._copied_in = [(0.0, -1)] * num_ranks
        self._rows = table.rows
        self._collectives = collectives

    def _note_waits(self, rows: Sequence[int], needed: Sequence[int]) -> None:
        for row, other in zip(rows, needed, strict=True):
            self._awaits.setdefault(row, []).append(other)

    def ready(self, row: int) -> bool:
        """Whether all that the row awaits from other ranks has its time."""
        return row not in self._awaits or all(self._done[other] or other == row for other in self._awaits[row])

    def take(self, rank: int, row: int) -> None:
        """Give the row its times and move its rank's stream on."""
        kind = self._kind[row]
        self._done[row] = True
        if kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            self._send(rank, row)
        elif kind == Kind.GATHER_WEIGHTS and self._weights_in_host:
            self._copied_in[rank] = self._put(row, self._compute[rank], self._copied_in[rank])
        elif kind in (Kind.REDUCE_GRADIENTS, Kind.GATHER_WEIGHTS):
            self._data_parallel[rank] = self._put(row, self._compute[rank], self._data_parallel[rank])
        elif kind in (Kind.REDUCE_TIED, Kind.REDUCE_SCALARS, Kind.REDUCE_COUNTS):
            # A collective is ready here; it ends for those who await it, when the last rank is ready.
            others = [self._data_parallel[rank]] if kind == Kind.REDUCE_SCALARS else []
            self.start[row], self.cause[row] = max([self._compute[rank], *others])
            self.end[row] = self.start[row]
        elif kind == Kind.OFFLOAD:
            self._offload(rank, row)
        elif kind == Kind.RELOAD:
            self._reload(rank, row)
        elif kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT, Kind.RELEASE_WEIGHTS):
            self.start[row], self.cause[row] = self._compute[rank]
            self.end[row] = self.start[row]
        else:
            self._compute[rank] = self._put(row, self._compute[rank], *self._awaited(row))

    def _put(self, row: int, *after: tuple[float, int]) -> tuple[float, int]:
        """Start a row after the latest of some (time, row); its own end."""
        self.start[row], self.cause[row] = max(after)
        self.end[row] = self.start[row] + self._duration[row]
        return self.end[row], row

    def _awaited(self, row: int) -> list[tuple[float, int]]:
        """When each awaited row's result is here: a message's arrival, or a collective's end."""
        if row not in self._awaits:
            return []
        return [(self.end[other] + self._delay(other), other) for other in self._awaits[row] if other != row]

    def _delay(self, row: int) -> float:
        """From a collective's start on its last rank to the result; the sum of scalars follows a tied one."""
        if self._kind[row] == Kind.REDUCE_TIED:
            return self._duration[row] + self._scalars
        return self._duration[row] if self._kind[row] in (Kind.REDUCE_SCALARS, Kind.REDUCE_COUNTS) else 0.0

    def _offload(self, rank: int, row: int) -> None:
        """One copy leaves at a time: compute waits for the one before, whose memory it goes on with."""
        self._compute[rank] = max(self._compute[rank], self._copied_out[rank])
        self._copied_out[rank] = self._put(row, self._compute[rank])

    def _reload(self, rank: int, row: int) -> None:
        """Copies arrive one after another. What leaves last is waited for where it comes back, and by a state, which
        needs the memory of the state that left before."""
        last = self._copied_out[rank][1]
        if last >= 0 and (self._rows[row, VERSION] >= 0 or np.array_equal(self._rows[row, 1:], self._rows[last, 1:])):
            self._compute[rank] = max(self._compute[rank], self._copied_out[rank])
        self._copied_in[rank] = self._put(row, self._compute[rank], self._copied_in[rank])

    def _send(self, rank: int, row: int) -> None:
        pair = self._link_of[row]
        link = self._links[pair]
        begin, self.cause[row] = max(
            self._compute[rank], self._link_free[pair], *self._awaited(row), key=lambda x: x[0]
        )
        self.start[row] = begin
        self._link_free[pair] = (begin + link.transfer, row)
        self.end[row] = begin + link.transfer + link.latency
        if self._blocking:
            self._compute[rank] = (self.end[row], row)

    def close_collectives(self) -> None:
        """Let each collective end, on every rank, when those who await it get its result."""
        pairs = list(zip(self._collectives.row.tolist(), self._collectives.needed.tolist(), strict=True))
        done: dict[int, float] = {}
        for row, member in pairs:
            done[row] = max(done.get(row, 0.0), self.start[member] + self._delay(member))
        for row, member in pairs:
            tied = self._kind[member] == Kind.REDUCE_TIED
            self.end[member] = max(self.end[member], done[row] - (self._scalars if tied else 0.0))
