"""The traces of a run: the file that each rank writes, and the whole run read from a folder."""

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

from megapipe.config.files import DECODING_ERRORS, is_of_type, read_json, write_whole
from megapipe.schedules.actions import Kind, short_word
from megapipe.schedules.build import read_file
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import SECTIONS, Schedule, SectionName
from megapipe.schedules.text import dumps

FORMAT: Final = "megapipe trace 1"
SCHEDULE_FILE: Final = "schedule.txt"
RANK_FILE: Final = re.compile(r"rank-([0-9]+)\.json")


class Event(NamedTuple):
    """The measured times of one action, in nanoseconds.

    ``section`` and ``position`` identify the action of its rank; ``step`` is the section's own step, from 0, and
    ``action`` the action's word, counted from there. The rank reached it at ``start`` and finished it at ``end``; of
    that time it waited ``wait`` for other ranks.
    """

    section: SectionName
    step: int
    position: int
    action: str
    start: int
    wait: int
    end: int


@dataclass(frozen=True)
class RankTrace:
    """One rank's file.

    ``run`` names the run and ``fingerprint`` the schedule's text: both are the same on all ranks. ``layout`` has the
    size of each parallel dimension, ``coordinates`` the rank's place in it. ``about``: model, versions and steps of
    the run. ``clock_error``: largest difference of this rank's clock from that of rank 0, in nanoseconds; 0 on the
    same host.
    """

    run: str
    fingerprint: str
    rank: int
    layout: Mapping[str, int]
    coordinates: Mapping[str, int]
    about: Mapping[str, Any]
    clock_error: int
    events: Sequence[Event]


def fingerprint(schedule_text: str) -> str:
    """Return a digest that differs between schedules."""
    return hashlib.sha256(schedule_text.encode()).hexdigest()[:16]


def write_rank(directory: Path, trace: RankTrace) -> None:
    """Write a rank's file, whole or not at all."""
    document = {"format": FORMAT, **vars(trace), "event_fields": Event._fields}
    text = json.dumps(document, separators=(",", ":")) + "\n"
    write_whole(directory / f"rank-{trace.rank}.json", text.encode())


def rank_files(directory: Path) -> dict[int, Path]:
    """Return the rank files of a folder, by rank. Raises ScheduleError if there are none."""
    if not directory.is_dir():
        raise ScheduleError(f"{directory} is not a folder; pass the folder of --profile.trace")
    matches = ((RANK_FILE.fullmatch(path.name), path) for path in directory.iterdir())
    files = {int(match[1]): path for match, path in matches if match}
    if not files:
        raise ScheduleError(f"{directory} has no rank-N.json; pass the folder of --profile.trace")
    return dict(sorted(files.items()))


def read_rank(path: Path) -> RankTrace:
    """Return the trace in a rank's file. Raises ScheduleError for a file that is cut off, or not a trace."""
    try:
        document = read_json(path, ScheduleError)
    except OSError as error:
        raise ScheduleError(f"cannot read {path}: {error.strerror}; choose the folder of --profile.trace") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        file_format = document.get("format") if isinstance(document, dict) else None
        raise ScheduleError(f"{path} has format {file_format!r}, but this version reads {FORMAT!r}")
    try:
        fields = {name: document[name] for name in RankTrace.__dataclass_fields__}
        for name, declared in get_type_hints(RankTrace).items():
            if not is_of_type(fields[name], declared):
                raise ScheduleError(f"{path}: its {name} is {reprlib.repr(fields[name])}")
        _check_place(path, fields["layout"], fields["coordinates"])
        return RankTrace(**(fields | {"events": [_event(row) for row in fields["events"]]}))
    except KeyError as error:
        raise ScheduleError(f"{path} lacks {error}") from None
    except DECODING_ERRORS as error:
        raise ScheduleError(f"{path} contains an invalid event: {error}") from None


def _check_place(path: Path, layout: Mapping[str, int], coordinates: Mapping[str, int]) -> None:
    if "pipeline" not in layout:
        raise ScheduleError(f"{path}: its layout {dict(layout)} lacks 'pipeline'; record again into an empty folder")
    if layout.keys() != coordinates.keys() or any(place >= layout[name] for name, place in coordinates.items()):
        raise ScheduleError(
            f"{path}: its coordinates {dict(coordinates)} are not in its "
            f"layout {dict(layout)}; record again into an empty folder"
        )


def _event(row: Any) -> Event:
    event = Event(*row)
    if event.section not in SECTIONS or not all(isinstance(value, int) for value in (*event[1:3], *event[4:])):
        raise ValueError(f"{row}; its fields are {', '.join(Event._fields)}")
    return event


class Execution(NamedTuple):
    """One run through a section of the schedule: the section and its own step, from 0."""

    section: SectionName
    step: int


Recorded = Mapping[Execution, tuple[Mapping[int, Event], ...]]
"""Per execution and pipeline rank, the events by position in the section."""


@dataclass(frozen=True)
class MeasuredRun:
    """The traces of the ranks of one pipeline; ``recorded`` has only steps that every rank finished."""

    schedule: Schedule
    layout: Mapping[str, int]
    about: Mapping[str, Any]
    clock_error: int
    recorded: Recorded

    @cached_property
    def episodes(self) -> list[list[Execution]]:
        """Executions that followed one another without the pipeline running empty between them, in order."""
        episodes: list[list[Execution]] = []
        for execution in sorted(self.recorded, key=lambda one: (one.step, SECTIONS.index(one.section))):
            if episodes and self._follows(episodes[-1][-1], execution):
                episodes[-1].append(execution)
            else:
                episodes.append([execution])
        return episodes

    def _follows(self, first: Execution, second: Execution) -> bool:
        if self.schedule.flushes or first.section == "epilogue" or second.section == "prologue":
            return False
        return second.step == first.step + (first.section == "body")


def read_run(directory: Path, pipeline: int = 0) -> MeasuredRun:
    """Return the run whose trace is in a folder.

    pipeline: which replica of the pipeline, by number in the order of their first ranks.

    Raises ScheduleError for files that are missing, cut off, or not of one run.
    """
    files = rank_files(directory)
    traces = [read_rank(path) for path in files.values()]
    for (rank, path), trace in zip(files.items(), traces, strict=True):
        if trace.rank != rank:
            raise ScheduleError(f"{path} was recorded by rank {trace.rank}; restore the original names of the files")
    chosen = _pipeline(directory, traces, pipeline)
    schedule = read_file(directory / SCHEDULE_FILE)
    first = chosen[0]
    if fingerprint(dumps(schedule)) != first.fingerprint:
        raise ScheduleError(
            f"{directory / SCHEDULE_FILE} is not the schedule of "
            f"{files[first.rank]}; record again into an empty folder"
        )
    if len(chosen) != schedule.header.num_ranks:
        raise ScheduleError(
            f"{directory / SCHEDULE_FILE} is for {schedule.header.num_ranks} "
            f"ranks, but the layout of {files[first.rank]} has "
            f"pipeline {len(chosen)}; record again into an empty folder"
        )
    recorded = _recorded(schedule, chosen)
    if not recorded:
        raise ScheduleError(
            f"{directory} has no step that all ranks finished; record more "
            "steps (--profile.steps), or earlier ones (--profile.first_step)"
        )
    return MeasuredRun(schedule, first.layout, first.about, max(trace.clock_error for trace in chosen), recorded)


def _pipeline(directory: Path, traces: list[RankTrace], number: int) -> list[RankTrace]:
    """Return the traces of one pipeline's ranks, in order. Raise if a rank is missing, or if they are not of one
    run."""
    first = traces[0]
    names = {"run": "run", "fingerprint": "schedule", "layout": "layout"}
    for trace in traces:
        for name, what in names.items():
            if getattr(trace, name) != getattr(first, name):
                raise ScheduleError(
                    f"{directory}: rank-{trace.rank}.json and rank-{first.rank}.json were "
                    f"recorded in different {what}s; record again into an empty folder"
                )
    layout, world = first.layout, prod(first.layout.values())
    present = {trace.rank for trace in traces}
    missing = list(islice((rank for rank in range(world) if rank not in present), 8))
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
    if len(ranks) < layout["pipeline"]:
        raise ScheduleError(
            f"{directory}: two ranks have the same coordinates in the "
            f"layout {dict(layout)}; record again into an empty folder"
        )
    return [ranks[rank] for rank in range(layout["pipeline"])]


def _recorded(schedule: Schedule, traces: list[RankTrace]) -> Recorded:
    """Return the executions of which every rank has all events."""
    words = {
        section: [
            [short_word(action, schedule.header.slices) for action in schedule.actions(section, rank)]
            for rank in range(len(traces))
        ]
        for section in SECTIONS
    }
    by_rank: list[dict[Execution, dict[int, Event]]] = []
    for rank, trace in enumerate(traces):
        executions: dict[Execution, dict[int, Event]] = {}
        for event in trace.events:
            expected = words[event.section][rank]
            if not 0 <= event.position < len(expected) or expected[event.position] != event.action:
                raise ScheduleError(
                    f"rank-{trace.rank}.json has {event.action} as action {event.position} "
                    f"of its {event.section}, which the schedule {schedule.header.name} "
                    "in the same folder does not have; record again into an empty folder"
                )
            executions.setdefault(Execution(event.section, event.step), {})[event.position] = event
        by_rank.append(executions)
    return {
        execution: tuple(executions[execution] for executions in by_rank)
        for execution in by_rank[0]
        if all(
            execution in executions and _is_whole(schedule, rank, execution.section, executions[execution])
            for rank, executions in enumerate(by_rank)
        )
    }


def _is_whole(schedule: Schedule, rank: int, section: SectionName, events: Mapping[int, Event]) -> bool:
    """Return whether every action has its event; of neighbouring updates, the event of the first one may cover all."""
    return all(
        position in events or action.kind == Kind.UPDATE
        for position, action in enumerate(schedule.actions(section, rank))
    )
