"""Trace files as a run would write them, made from a simulation: what really happened is then known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megapipe.config.files import write_whole
from megapipe.schedules import Costs, Kind, Schedule, dumps, simulate
from megapipe.schedules.actions import write_action
from megapipe.schedules.measured.traces import (
    SCHEDULE_FILE,
    Event,
    RankTrace,
    fingerprint,
    write_rank,
)
from megapipe.schedules.schedule import SECTIONS, SectionName
from megapipe.schedules.table import Table

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.UPDATE)
STEP_APART = 1_000_000_000
"""Nanoseconds from one flushing step's start to the next one's."""


def write_trace(
    directory: Path,
    schedule: Schedule,
    costs: Costs,
    steps: int = 3,
    change: Callable[[Event, int], Event] = lambda event, rank: event,
    clock_error: int = 0,
) -> None:
    """Write what ranks would that take exactly the costs, in milliseconds.

    change: applied to each event and its pipeline rank.
    """
    header, text = schedule.header, dumps(schedule)
    write_whole(directory / SCHEDULE_FILE, text.encode())
    ranks: list[list[Event]] = [[] for _ in range(header.num_ranks)]
    for first in range(steps) if schedule.flushes else (0,):
        for rank, events in enumerate(_simulated(schedule, costs, 1 if schedule.flushes else steps)):
            late = STEP_APART * first
            moved = (e._replace(step=e.step + first, start=e.start + late, end=e.end + late) for e in events)
            ranks[rank] += [change(event, rank) for event in moved]
    layout, about = {"data": 1, "pipeline": header.num_ranks, "tensor": 1}, {"model": {"num_layers": 4}}
    for rank, events in enumerate(ranks):
        place = {"data": 0, "pipeline": rank, "tensor": 0}
        trace = RankTrace("a run", fingerprint(text), rank, layout, place, about, clock_error, events)
        write_rank(directory, trace)


def pause(at: float, length: float) -> Callable[[Event, int], Event]:
    """Pause all ranks for `length` milliseconds at a time: actions and waits take longer."""
    nanoseconds, moment = round(length * 1e6), round(at * 1e6)

    def later(event: Event, rank: int) -> Event:
        start, end = (t + nanoseconds * (t > moment) for t in (event.start, event.end))
        waits = event.start <= moment < event.start + event.wait
        return event._replace(start=start, end=end, wait=event.wait + nanoseconds * waits)

    return later


def _simulated(schedule: Schedule, costs: Costs, steps: int) -> list[list[Event]]:
    """Per rank what the simulator makes of every action; of neighbouring updates one event, as the engine has it."""
    simulation = simulate(schedule, costs, steps)
    table = simulation.table
    ranks = []
    for rank in range(schedule.header.num_ranks):
        words = {
            section: [
                write_action(action._replace(version=-1, slot=-1), schedule.header.slices)
                for action in schedule.actions(section, rank)
            ]
            for section in SECTIONS
        }
        events: list[Event] = []
        clock, updating = 0.0, False
        for section in range(table.num_sections):
            rows = np.flatnonzero((table.rank == rank) & (table.section == section))
            name, step = _section(schedule, table, section)
            for position, row in enumerate(rows.tolist()):
                wait, end = 0.0, clock
                if table.kind[row] in COMPUTE:
                    wait, end = float(simulation.start[row]) - clock, float(simulation.end[row])
                times = (round(time * 1e6) for time in (clock, wait, end))
                if updating and table.kind[row] == Kind.UPDATE and position > 0:
                    events[-1] = events[-1]._replace(end=round(end * 1e6))
                else:
                    events.append(Event(name, step, position, words[name][position], *times))
                clock, updating = end, table.kind[row] == Kind.UPDATE
        ranks.append(events)
    return ranks


def _section(schedule: Schedule, table: Table, section: int) -> tuple[SectionName, int]:
    if section == 0:
        return "prologue", 0
    if section == table.num_sections - 1:
        return "epilogue", table.num_sections - 2
    return "body", section - 1
