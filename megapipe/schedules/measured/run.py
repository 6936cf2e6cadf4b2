"""A measured run: the rank files of one pipeline, checked against one another and against their schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.load_file import read_file
from megapipe.schedules.measured.trace_file import SCHEDULE_FILE, Event, RankTrace, fingerprint, rank_files, read_rank
from megapipe.schedules.schedule import SECTIONS, Schedule, SectionName
from megapipe.schedules.text import dumps
from megapipe.schedules.tokens import write_action


class Execution(NamedTuple):
    """One run through a section of the schedule: the section and its own step, from 0."""

    section: SectionName
    step: int


Recorded = Mapping[Execution, tuple[Mapping[int, Event], ...]]
"""Per execution and pipeline rank, the events by position in the section."""


@dataclass(frozen=True)
class MeasuredRun:
    """What the ranks of one pipeline did; ``recorded`` holds only what every rank finished."""

    schedule: Schedule
    layout: Mapping[str, int]
    about: Mapping[str, Any]
    clock_error: int
    recorded: Recorded

    @cached_property
    def episodes(self) -> list[list[Execution]]:
        """Executions that followed one another without the pipeline running empty between them, in order."""
        found: list[list[Execution]] = []
        for each in sorted(self.recorded, key=lambda one: (one.step, SECTIONS.index(one.section))):
            if found and self._follows(found[-1][-1], each):
                found[-1].append(each)
            else:
                found.append([each])
        return found

    def _follows(self, first: Execution, second: Execution) -> bool:
        if self.schedule.flushes or first.section == "epilogue" or second.section == "prologue":
            return False
        return second.step == first.step + (first.section == "body")


def read_run(directory: Path, pipeline: int = 0) -> MeasuredRun:
    """The run whose trace lies in a folder.

    pipeline: which replica of the pipeline, by number in the order of their first ranks.

    Raises ScheduleError for files that are missing, cut off, or not of one run.
    """
    files = rank_files(directory)
    traces = [read_rank(path) for path in files.values()]
    chosen = _pipeline(directory, traces, pipeline)
    schedule = read_file(directory / SCHEDULE_FILE)
    first = chosen[0]
    if fingerprint(dumps(schedule)) != first.fingerprint:
        raise ScheduleError(
            f"{directory / SCHEDULE_FILE} is not the schedule of {files[first.rank]}; record again into an empty "
            "folder"
        )
    recorded = _recorded(schedule, chosen)
    if not recorded:
        raise ScheduleError(
            f"{directory} has no step that all ranks finished; record more steps (--profile.steps), or earlier ones "
            "(--profile.first_step)"
        )
    return MeasuredRun(schedule, first.layout, first.about, max(trace.clock_error for trace in chosen), recorded)


def _pipeline(directory: Path, traces: list[RankTrace], number: int) -> list[RankTrace]:
    """The ranks of one pipeline in order, all there and all of one run."""
    first = traces[0]
    for trace in traces:
        for name in ("run", "fingerprint"):
            if getattr(trace, name) != getattr(first, name):
                what = "run" if name == "run" else "schedule"
                raise ScheduleError(
                    f"{directory}: rank-{trace.rank}.json and rank-{first.rank}.json were recorded in different "
                    f"{what}s; record again into an empty folder"
                )
    layout, world = first.layout, prod(first.layout.values())
    missing = sorted(set(range(world)) - {trace.rank for trace in traces})
    if missing:
        raise ScheduleError(
            f"{directory} lacks {', '.join(f'rank-{rank}.json' for rank in missing)}: the run had {world} ranks, each "
            "of which writes its file on its own host; copy all files into one folder"
        )
    pipelines: dict[tuple[int, ...], dict[int, RankTrace]] = {}
    for trace in sorted(traces, key=lambda one: one.rank):
        replica = tuple(trace.coordinates[name] for name in layout if name != "pipeline")
        pipelines.setdefault(replica, {})[trace.coordinates["pipeline"]] = trace
    if not 0 <= number < len(pipelines):
        raise ScheduleError(f"pipeline {number} does not exist: the run had {len(pipelines)}, numbered from 0")
    ranks = list(pipelines.values())[number]
    return [ranks[rank] for rank in range(layout["pipeline"])]


def _recorded(schedule: Schedule, traces: list[RankTrace]) -> Recorded:
    """The executions that every rank has whole."""
    words = {
        section: [
            [write_action(_bare(action)) for action in schedule.actions(section, rank)] for rank in range(len(traces))
        ]
        for section in SECTIONS
    }
    found: list[dict[Execution, dict[int, Event]]] = []
    for rank, trace in enumerate(traces):
        mine: dict[Execution, dict[int, Event]] = {}
        for event in trace.events:
            expected = words[event.section][rank]
            if not 0 <= event.position < len(expected) or expected[event.position] != event.action:
                raise ScheduleError(
                    f"rank-{trace.rank}.json has {event.action} as action {event.position} of its {event.section}, "
                    f"which the schedule {schedule.header.name} in the same folder does not have; record again into "
                    "an empty folder"
                )
            mine.setdefault(Execution(event.section, event.step), {})[event.position] = event
        found.append(mine)
    return {
        execution: tuple(mine[execution] for mine in found)
        for execution in found[0]
        if all(
            execution in mine and _is_whole(schedule, rank, execution.section, mine[execution])
            for rank, mine in enumerate(found)
        )
    }


def _is_whole(schedule: Schedule, rank: int, section: SectionName, events: Mapping[int, Event]) -> bool:
    """Whether every action has its event; of updates in a row the first one's may cover all."""
    return all(
        position in events or action.kind == Kind.UPDATE
        for position, action in enumerate(schedule.actions(section, rank))
    )


def _bare(action: Action) -> Action:
    return action._replace(version=-1, slot=-1)
