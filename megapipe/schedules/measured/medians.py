"""Windows of measured steps, and the median times of the actions in them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, KIND, STAGE, UNIT, Action, Floats, Ints, Kind, Mask
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.measured.traces import Event, Execution, MeasuredRun
from megapipe.schedules.schedule import Header
from megapipe.schedules.simulation import CostPlace, Costs, Link, stage_times
from megapipe.schedules.simulation.costs import TIMED
from megapipe.schedules.table import Table

LEAD_BODIES = 2
"""Bodies simulated before a window that starts in the middle of a run, so that the pipeline is full and steady."""
MILLISECOND = 1e6
"""Nanoseconds."""


@dataclass(frozen=True)
class Window:
    """Rows of a table and what the run did with them, in milliseconds.

    ``table`` unrolls the steps that the window needs, ``first_step`` is the number of the first one (from 0).
    ``start``, ``wait`` and ``end`` are NaN for rows without an event. ``rows`` are those inside the window, and
    ``owner`` gives, for each row of the table, the row whose event covers it: an update's first, else itself.
    """

    table: Table
    first_step: int
    steps: tuple[int, ...]
    start: Floats
    wait: Floats
    end: Floats
    rows: Ints
    owner: Ints

    @property
    def seen(self) -> Mask:
        """Whether each row has an event, shape [rows]."""
        return ~np.isnan(self.start)


def choose(run: MeasuredRun, step: int | None) -> Window:
    """Return the window of a step (from 0), or of the longest episode if it is None; of equally long ones, the one
    with the median duration.

    Raises ScheduleError if that step was not recorded.
    """
    episodes = run.episodes
    if step is not None:
        episodes = [[each for each in episode if each.step == step] for episode in episodes]
        episodes = [episode for episode in episodes if episode]
        if not episodes:
            recorded = sorted({each.step + 1 for each in run.recorded})
            raise ScheduleError(f"step {step + 1} was not recorded; choose one of {', '.join(map(str, recorded))}")
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
    """Return the number of an execution's section in the table (0 prologue, 1.. bodies, last epilogue)."""
    if execution.section == "prologue":
        return 0
    return table.num_sections - 1 if execution.section == "epilogue" else 1 + execution.step - first_step


WAITED = 0.02
"""Shortest wait for a message, in milliseconds, whose end counts as the arrival of the message."""


@dataclass(frozen=True)
class MeasuredCosts:
    """``costs`` in milliseconds. ``clock_excess``: longest time by which a message seemed to arrive before it was
    sent."""

    costs: Costs
    clock_excess: float


def measured_costs(run: MeasuredRun, window: Window) -> MeasuredCosts:
    """Return times of compute and updates over all recorded steps, without waiting, and of messages over the window.

    A message's time is known if its receiver waited for it, from its send to its arrival; if its receivers never
    waited, it counts as zero. The same holds for gathers of weights. The sum of scalars takes from its last rank's
    start to its end on the others, which includes the rest of gradient reductions.
    """
    header = run.schedule.header
    links, excess = _links(window)
    unmeasured = stage_times(header, dict.fromkeys(TIMED, (0.0,) * len(header.stages)))
    copies = {(place.stage, place.unit): 0.0 for place in unmeasured if place.kind == Kind.UPDATE}
    costs = Costs(unmeasured | _work(run) | _gathers(window), copies, reduce_scalars=_scalars(run), links=links)
    return MeasuredCosts(costs, excess)


def _events(run: MeasuredRun) -> Iterator[tuple[Execution, list[Action], Event]]:
    """Yield every event with its execution and the actions that it covers: one action, or neighbouring updates."""
    for execution, ranks in run.recorded.items():
        for rank, events in enumerate(ranks):
            actions = list(run.schedule.actions(execution.section, rank))
            ordered = sorted(events)
            for position, following in pairwise([*ordered, len(actions)]):
                yield execution, actions[position:following], events[position]


def _work(run: MeasuredRun) -> dict[CostPlace, float]:
    """Return the median time of each kind on each unit, and on the whole stage, for which units are added up.

    An event that covers several updates does not have the time of each: units get parts of its time by their sizes.
    """
    times: dict[CostPlace, dict[tuple[Execution, int], float]] = defaultdict(lambda: defaultdict(float))
    for execution, actions, event in _events(run):
        if actions[0].kind in (*COMPUTE_STREAM, Kind.UPDATE):
            sizes = [_size(run.schedule.header, action) for action in actions]
            time = (event.end - event.start - event.wait) / MILLISECOND
            for action, size in zip(actions, sizes, strict=True):
                for unit in {action.unit, -1}:
                    place = CostPlace(action.kind, action.stage, unit)
                    times[place][execution, action.microbatch] += time * size / sum(sizes)
    return {place: median(values.values()) for place, values in times.items()}


def _size(header: Header, action: Action) -> int:
    """Return the size of an update's state unit; 1 for a tied weight, whose size no header has, and for compute."""
    units = header.stage_states[action.stage]
    return max(1, units[action.unit].size) if action.kind == Kind.UPDATE and action.unit < len(units) else 1


def _gathers(window: Window) -> dict[CostPlace, float]:
    """Return the median time of a gather of each state unit's weights, where an action waited for it alone.

    A rank's gathers and reductions take turns. A gather that an action waited for ended with that wait, and took the
    time since its start. If others before it may still have run, it took a part of the common time, by its size.
    """
    table, needs = window.table, Dependencies(window.table)
    uses, buffers = needs.gathers, needs.gradient_buffers
    reached = window.start + window.wait
    over, last = np.full(len(table.rows), np.nan), np.full(len(table.rows), -1)
    np.fmin.at(over, np.append(uses.needed, buffers.needed), reached[np.append(uses.row, buffers.row)])
    np.maximum.at(last, uses.row, uses.needed)
    waited = (last >= 0) & (window.wait > WAITED)
    waited[needs.messages.use] = False
    ended = dict(zip(last[waited].tolist(), reached[waited].tolist(), strict=True))
    sizes, seen = table.header.state_sizes, defaultdict[CostPlace, list[float]](list)
    running: list[int] = []
    free, rank = -np.inf, -1
    for row in table.rows_with(Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS).tolist():
        if table.rank[row] != rank:
            running, free, rank = [], -np.inf, table.rank[row]
        running = [other for other in running if not over[other] <= window.start[row]] + [row]
        if row in ended:
            shared = table.rows[running]
            parts = sizes[shared[:, STAGE], shared[:, UNIT]] / sizes[shared[:, STAGE], shared[:, UNIT]].sum()
            whole = ended[row] - max(free, window.start[running[0]])
            for (kind, stage, unit), part in zip(shared[:, [KIND, STAGE, UNIT]].tolist(), parts.tolist(), strict=True):
                seen[CostPlace(Kind(kind), stage, unit)].append(whole * part)
            running, free = [], ended[row]
    return {place: median(times) for place, times in seen.items() if place.kind == Kind.GATHER_WEIGHTS}


def _links(window: Window) -> tuple[dict[tuple[int, int], Link], float]:
    """Return the time of a message between two ranks, for each pair that sends, and the longest time by which a
    message arrived before it was sent."""
    table = window.table
    messages = Dependencies(table).messages
    took = window.start[messages.use] + window.wait[messages.use] - window.start[messages.send]
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for index in np.flatnonzero((window.wait[messages.use] > WAITED) & ~np.isnan(took)).tolist():
        pair = int(table.rank[messages.send[index]]), int(table.rank[messages.use[index]])
        seen[pair].append(float(took[index]))
    links = {pair: Link(latency=max(0.0, median(times))) for pair, times in seen.items()}
    return links, float(np.nanmax(-took, initial=0.0))


def _scalars(run: MeasuredRun) -> float:
    """Return the median time of a step's sum of scalars, from its start on the last rank to its result.

    Where no rank waited for the result, its end is not known: such a sum counts as the median of steps in which a rank
    waited, but ends at the latest when the first update needs it.
    """
    header = run.schedule.header
    period, awaited = header.num_microbatches, header.updates_per_step == 1
    starts, ends, waits, wanted = (defaultdict[int, list[int]](list) for _ in range(4))
    for execution, actions, event in _events(run):
        step = execution.step + actions[0].microbatch // period
        waited = event.wait > WAITED * MILLISECOND
        if actions[0].kind == Kind.REDUCE_SCALARS:
            starts[step].append(event.start)
            (waits if waited else ends)[step].append(event.end)
        elif actions[0].kind == Kind.UPDATE and awaited:
            wanted[step].append(event.start)
            waits[step] += [event.start + event.wait] * waited
    complete = [step for step, mine in starts.items() if len(mine) == header.num_ranks]
    measured = {step: min(waits[step]) - max(starts[step]) for step in complete if waits[step]}
    if measured:
        typical = median(measured.values())
        hidden = (step for step in complete if step not in measured and wanted[step])
        times = [*measured.values(), *(min(typical, min(wanted[step]) - max(starts[step])) for step in hidden)]
    else:
        times = [max(ends[step]) - max(starts[step]) for step in complete]
    return max(0.0, median(times)) / MILLISECOND if times else 0.0
