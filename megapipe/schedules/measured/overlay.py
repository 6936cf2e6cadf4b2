"""Measured over predicted: both runs on the same rows, from a common zero, and where they part."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, Ints, Kind
from megapipe.schedules.measured.medians import MeasuredCosts
from megapipe.schedules.measured.run import MeasuredRun
from megapipe.schedules.measured.window import Times, Window
from megapipe.schedules.simulation import Simulation, simulate


class Side(NamedTuple):
    """One rank's time in the window, of one of the two runs, in milliseconds.

    ``span``: from its first compute's start to its last compute's or update's end. ``compute``: forwards and
    backwards. ``wait``: waiting for other ranks. ``between``: neither compute, update nor waiting.
    """

    span: float
    compute: float
    wait: float
    between: float

    @property
    def bubble(self) -> float:
        """What the rank's compute does not fill, as a part of it."""
        return self.span / self.compute - 1.0


class Parting(NamedTuple):
    """An action that took the rank longer than predicted, from the end of the one before it, in milliseconds.

    ``lost`` is the sum of the other three: longer waiting, a slower action, time between the actions.
    """

    row: int
    lost: float
    wait: float
    work: float
    between: float


@dataclass(frozen=True)
class Overlay:
    """Both runs on the rows of ``window.table``; times in milliseconds from the first compute's start of each.

    ``rows`` are the compute and update rows that both have, by rank, in program order; the arrays have one entry a row
    of theirs: ``measured_start`` is where the work begins, behind the ``measured_wait``. The zeros are those of the
    window's and the simulation's own times.
    """

    run: MeasuredRun
    window: Window
    costs: MeasuredCosts
    simulation: Simulation
    measured_zero: float
    predicted_zero: float
    rows: Ints
    measured_start: Times
    measured_end: Times
    measured_wait: Times
    predicted_start: Times
    predicted_end: Times

    @cached_property
    def ranks(self) -> list[tuple[Side, Side]]:
        """Per rank its measured and its predicted time."""
        return [(self._measured_side(rank), self._predicted_side(rank)) for rank in range(self._num_ranks)]

    @cached_property
    def partings(self) -> list[Parting]:
        """Every row, the one that lost most first; per rank their sum is what its span exceeds the predicted by."""
        found = []
        for rank in range(self._num_ranks):
            mine = self._rows_of(rank)
            waits = self._waits_until(rank, mine)
            for order, at in enumerate(mine.tolist()):
                work, predicted_work = (
                    float(end[at] - start[at])
                    for start, end in (
                        (self.measured_start, self.measured_end),
                        (self.predicted_start, self.predicted_end),
                    )
                )
                if order == 0:
                    took, predicted, wait, predicted_wait = work, predicted_work, 0.0, 0.0
                else:
                    before = mine[order - 1]
                    took = float(self.measured_end[at] - self.measured_end[before])
                    predicted = float(self.predicted_end[at] - self.predicted_end[before])
                    wait, predicted_wait = waits[order], predicted - predicted_work
                between = took - work - wait
                row = int(self.rows[at])
                found.append(Parting(row, took - predicted, wait - predicted_wait, work - predicted_work, between))
        return sorted(found, key=lambda parting: -parting.lost)

    @cached_property
    def lag(self) -> list[list[tuple[float, float]]]:
        """Per rank, how far the measured run is behind the predicted one at the end of each action."""
        late = self.measured_end - self.predicted_end
        return [
            list(zip(self.measured_end[mine].tolist(), late[mine].tolist(), strict=True))
            for mine in map(self._rows_of, range(self._num_ranks))
        ]

    @property
    def finish(self) -> float:
        """When the later of the two runs ends."""
        return float(max(self.measured_end.max(), self.predicted_end.max()))

    @cached_property
    def slowest(self) -> int:
        """The rank with the longest measured time."""
        return int(np.argmax([measured.span for measured, _ in self.ranks]))

    @property
    def excess(self) -> float:
        """How much longer the slowest rank took than predicted, as a part of that."""
        measured, predicted = self.ranks[self.slowest]
        return round(measured.span / predicted.span - 1.0, 6) + 0.0  # a rounded nothing has no sign

    @property
    def _num_ranks(self) -> int:
        return self.window.table.header.num_ranks

    def _rows_of(self, rank: int) -> Ints:
        """Places in ``rows`` of a rank's actions."""
        return np.flatnonzero(self.window.table.rank[self.rows] == rank)

    def _waits_until(self, rank: int, mine: Ints) -> list[float]:
        """For each of a rank's actions, the waiting since the one before it: its own, and that of rows between."""
        waited = np.nan_to_num(self.window.wait)
        total = np.concatenate([[0.0], np.cumsum(waited)])
        rows = self.rows[mine]
        before = np.concatenate([rows[:1], rows[:-1]])
        found: list[float] = (total[rows + 1] - total[before + 1]).tolist()
        return found

    def _measured_side(self, rank: int) -> Side:
        mine = self._rows_of(rank)
        wait = sum(self._waits_until(rank, mine)[1:])
        return self._side(mine, self.measured_start, self.measured_end, wait)

    def _predicted_side(self, rank: int) -> Side:
        mine = self._rows_of(rank)
        start, end = self.predicted_start[mine], self.predicted_end[mine]
        idle = float(end[-1] - start[0] - (end - start).sum())
        return self._side(mine, self.predicted_start, self.predicted_end, idle)

    def _side(self, mine: Ints, start: Times, end: Times, wait: float) -> Side:
        span = float(end[mine[-1]] - start[mine[0]])
        work = end[mine] - start[mine]
        compute = float(work[np.isin(self.window.table.kind[self.rows[mine]], COMPUTE_STREAM)].sum())
        return Side(span, compute, wait, span - float(work.sum()) - wait)


def lay_over(run: MeasuredRun, window: Window, costs: MeasuredCosts) -> Overlay:
    """The window's rows as measured, and as simulated with the given times."""
    table = window.table
    simulation = simulate(run.schedule, costs.costs, table.steps)
    wanted = window.seen & table.is_kind(*COMPUTE_STREAM, Kind.UPDATE)
    rows = np.flatnonzero(wanted)
    end = predicted_ends(window, simulation)
    measured_start = (window.start + window.wait)[rows]
    compute = np.isin(table.kind[rows], COMPUTE_STREAM)
    measured_zero = float(measured_start[compute].min())
    predicted_zero = float(simulation.start[rows][compute].min())
    return Overlay(
        run,
        window,
        costs,
        simulation,
        measured_zero,
        predicted_zero,
        rows,
        measured_start - measured_zero,
        window.end[rows] - measured_zero,
        window.wait[rows],
        simulation.start[rows] - predicted_zero,
        end[rows] - predicted_zero,
    )


def predicted_ends(window: Window, simulation: Simulation) -> Times:
    """When each row ends; an update whose event covers its neighbours ends where the last of them does."""
    end = simulation.end.copy()
    np.maximum.at(end, window.owner[window.rows], simulation.end[window.rows])
    return end
