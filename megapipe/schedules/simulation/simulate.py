"""An event-driven run of a lowered schedule: when does each action start and end, and what does that cost?"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import COMPUTE_STREAM, Ints, Kind, Mask
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.memory import peak_activations, pending_weight_halves
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.simulation.costs import Costs
from megapipe.schedules.simulation.run import Durations, run
from megapipe.schedules.table import Table

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """The simulated steps.

    ``start`` and ``end`` give each row of ``table`` its time: a send ends when its message has arrived, a receive when
    it is posted, a reduction when its result is there. ``cause`` is the row whose end let it start, -1 for none.
    """

    table: Table
    start: Times
    end: Times
    cause: Ints
    working: Mask
    durations: Times

    @property
    def finish(self) -> float:
        """When the last rank ends."""
        return float(self.end[self.working].max(initial=0.0))

    @property
    def makespan(self) -> float:
        """Longest time on any one rank from its first forward's start to the end of its last action that takes time
        (the cost of the zero-bubble paper, arXiv 2401.10241: waiting for the first forward does not count)."""
        spans = []
        for first, last in zip(self.table.offsets, self.table.offsets[1:], strict=False):
            working = self.working[first:last]
            begins = self.start[first:last][self.table.kind[first:last] == Kind.FORWARD].min(initial=np.inf)
            if working.any():
                spans.append(float(self.end[first:last][working].max() - begins))
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
        """Per rank, in micro-batches of the whole rank's layers."""
        return peak_activations(self.table)

    @property
    def pending_weight_halves(self) -> tuple[float, ...]:
        """Per rank, in micro-batches of the whole rank's layers."""
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
        """Rows of ``table`` that the finish hangs on, first to last."""
        row = int(np.argmax(np.where(self.working, self.end, -np.inf)))
        path = []
        while row >= 0:
            path.append(row)
            row = int(self.cause[row])
        return path[::-1]


def simulate(schedule: Schedule, costs: Costs, steps: int = 1) -> Simulation:
    """Run ``steps`` optimizer steps of a lowered schedule with the given times.

    Raises ScheduleError if the schedule is not lowered, or if its ranks wait for one another in a circle.
    """
    if not schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} has only compute actions; lower it before simulating it")
    table = Table.unroll(schedule, steps)
    durations = Durations.of(table, costs)
    timeline = run(Dependencies(table), costs, durations)
    return Simulation(
        table, np.array(timeline.start), np.array(timeline.end), np.array(timeline.cause, dtype=np.int64),
        durations.of_row > 0.0, durations.of_row,
    )  # fmt: skip
