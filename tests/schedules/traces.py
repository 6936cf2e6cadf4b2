"""Trace files as a run would write them, made from a simulation: what really happened is then known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megapipe.schedules import Costs, Kind, Schedule, dumps, simulate
from megapipe.schedules.measured.trace_file import SCHEDULE_FILE, Event, RankTrace, fingerprint, write_rank, write_whole
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.tokens import write_action

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.UPDATE)


def write_trace(
    directory: Path,
    schedule: Schedule,
    costs: Costs,
    steps: int = 3,
    change: Callable[[Event, int], Event] = lambda event, rank: event,
    run: str = "a run",
    only: tuple[int, ...] | None = None,
    data: int = 1,
) -> None:
    """Write what ranks would that take exactly the costs, in milliseconds; flushing steps 100 ms apart.

    change: applied to each event of each pipeline rank. only: the sections' steps to keep. data: equal replicas.
    """
    header, text = schedule.header, dumps(schedule)
    write_whole(directory / SCHEDULE_FILE, text)
    events: list[list[Event]] = [[] for _ in range(header.num_ranks)]
    for first in range(steps) if schedule.flushes else (0,):
        for rank, mine in enumerate(_events(schedule, costs, 1 if schedule.flushes else steps)):
            late = int(100e6) * first
            events[rank] += [
                change(e._replace(step=e.step + first, start=e.start + late, end=e.end + late), rank) for e in mine
            ]
    layout = {"data": data, "pipeline": header.num_ranks, "tensor": 1}
    about = {"model": {"num_layers": 4}, "layout": layout, "world_size": data * header.num_ranks, "steps": [1, steps]}
    for replica in range(data):
        for rank, mine in enumerate(events):
            place = {"data": replica, "pipeline": rank, "tensor": 0}
            kept = [event for event in mine if only is None or event.step in only]
            number = replica * header.num_ranks + rank
            write_rank(directory, RankTrace(run, fingerprint(text), number, place, about, 0, kept))


def _events(schedule: Schedule, costs: Costs, steps: int) -> list[list[Event]]:
    simulation = simulate(schedule, costs, steps)
    table = simulation.table
    found: list[list[Event]] = []
    for rank in range(schedule.header.num_ranks):
        rows = np.flatnonzero(table.rank == rank)
        mine, clock, at = [], 0.0, 0
        counts: dict[int, int] = {}
        for row in rows.tolist():
            section = int(table.section[row])
            name = SECTIONS[0 if section == 0 else 2 if section == table.num_sections - 1 else 1]
            position = counts.get(section, 0)
            counts[section] = position + 1
            actions = list(schedule.actions(name, rank))
            word = write_action(actions[position]._replace(version=-1, slot=-1))
            step = 0 if section == 0 else section - 1
            if name == "epilogue" and not schedule.flushes:
                step = table.num_sections - 2
            start = clock
            wait = 0.0
            if table.kind[row] in COMPUTE:
                wait = float(simulation.start[row]) - clock
                clock = float(simulation.end[row])
            mine.append(Event(name, step, position, word, *(round(t * 1e6) for t in (start, wait, clock))))
            at += 1
        found.append(mine)
    return found
