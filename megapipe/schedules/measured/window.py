"""What is compared: the steps of one episode, on the rows of the unrolled schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import Ints, Mask
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.measured.run import Execution, MeasuredRun
from megapipe.schedules.table import Table

Times = npt.NDArray[np.float64]

LEAD_BODIES = 2
"""Bodies simulated ahead of a window that begins in the middle of a run, so that the pipeline is full and steady."""
MILLISECOND = 1e6


@dataclass(frozen=True)
class Window:
    """Rows of a table and what the run did with them, in milliseconds.

    ``table`` unrolls as many steps as the window needs, ``first_step`` is the number of its first one (from 0).
    ``start``, ``wait`` and ``end`` are NaN for rows without an event. ``rows`` are those inside the window, and
    ``owner`` gives, for each row of the table, the row whose event covers it: an update's first, else itself.
    """

    table: Table
    first_step: int
    steps: tuple[int, ...]
    start: Times
    wait: Times
    end: Times
    rows: Ints
    owner: Ints

    @property
    def seen(self) -> Mask:
        """Which rows have an event."""
        return ~np.isnan(self.start)


def choose(run: MeasuredRun, step: int | None) -> Window:
    """The window of a step (from 0), or of the longest episode, among equals that of the median duration.

    Raises ScheduleError where that step was not recorded.
    """
    episodes = run.episodes
    if step is not None:
        episodes = [[each for each in episode if each.step == step] for episode in episodes]
        episodes = [episode for episode in episodes if episode]
        if not episodes:
            known = sorted({each.step + 1 for each in run.recorded})
            raise ScheduleError(
                f"step {step + 1} was not recorded; the recorded steps are {', '.join(map(str, known))}"
            )
    longest = max(map(len, episodes))
    candidates = sorted((e for e in episodes if len(e) == longest), key=lambda episode: _duration(run, episode))
    return _window(run, candidates[(len(candidates) - 1) // 2])


def _duration(run: MeasuredRun, episode: Sequence[Execution]) -> int:
    events = [event for each in episode for mine in run.recorded[each] for event in mine.values()]
    return max(event.end for event in events) - min(event.start for event in events)


def _window(run: MeasuredRun, episode: Sequence[Execution]) -> Window:
    schedule, first = run.schedule, episode[0]
    bodies = sum(each.section == "body" for each in episode)
    lead = LEAD_BODIES if not schedule.flushes and first.section != "prologue" else 0
    table = Table.unroll(schedule, schedule.prologue_steps + lead + bodies)
    start, wait, end = (np.full(len(table.rows), np.nan) for _ in range(3))
    owner = np.arange(len(table.rows))
    inside = np.zeros(len(table.rows), dtype=np.bool_)
    for execution in episode:
        section = _section_index(table, execution, first.step - lead)
        for rank, events in enumerate(run.recorded[execution]):
            rows = np.flatnonzero((table.rank == rank) & (table.section == section))
            inside[rows] = True
            positions = np.array(sorted(events), dtype=np.int64)
            times = np.array([(events[p].start, events[p].wait, events[p].end) for p in positions], dtype=np.float64)
            if len(rows) == 0:
                continue
            start[rows[positions]], wait[rows[positions]], end[rows[positions]] = times.T / MILLISECOND
            covering = np.searchsorted(positions, np.arange(len(rows)), side="right") - 1
            owner[rows] = rows[positions[covering]]
    steps = tuple(dict.fromkeys(each.step for each in episode))
    return Window(table, first.step - lead, steps, start, wait, end, np.flatnonzero(inside), owner)


def _section_index(table: Table, execution: Execution, first_step: int) -> int:
    """Which of the table's sections (0 prologue, 1.. bodies, last epilogue) an execution is."""
    if execution.section == "prologue":
        return 0
    return table.num_sections - 1 if execution.section == "epilogue" else 1 + execution.step - first_step
