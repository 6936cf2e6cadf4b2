"""The files of a measured trace: one a rank, and the schedule's own text beside them.

``rank-N.json`` holds what rank N did: one event an action, by the place of the action in the schedule. Times are
nanoseconds on one clock, that of rank 0's host.
"""

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

from megapipe.config.untrusted import DECODING_ERRORS, is_of_type, read_json
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import SECTIONS, SectionName

FORMAT: Final = "megapipe trace 1"
SCHEDULE_FILE: Final = "schedule.txt"
RANK_FILE: Final = re.compile(r"rank-(\d+)\.json")


class Event(NamedTuple):
    """What happened to one action.

    ``section`` and ``position`` say which action of its rank it is; ``step`` is the section's own step, from 0, and
    ``action`` the action's word, counted from there. The rank reached it at ``start`` and was done with it at ``end``;
    of that time ``wait`` went into waiting for other ranks. Nanoseconds.
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
    size of each parallel dimension, ``coordinates`` the rank's place in it. ``about`` says what ran: model, versions,
    steps.
    ``clock_error`` is how far this rank's times may be off from rank 0's, in nanoseconds; 0 on the same host.
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
    """What tells schedules apart."""
    return hashlib.sha256(schedule_text.encode()).hexdigest()[:16]


def write_rank(directory: Path, trace: RankTrace) -> None:
    """Write a rank's file, whole or not at all."""
    document = {"format": FORMAT, **vars(trace), "event_fields": Event._fields}
    write_whole(directory / f"rank-{trace.rank}.json", json.dumps(document, separators=(",", ":")) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text aside, flush it to disk and rename it; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def rank_files(directory: Path) -> dict[int, Path]:
    """The rank files of a folder, by rank. Raises ScheduleError where there are none."""
    if not directory.is_dir():
        raise ScheduleError(f"{directory} is not a folder; pass the folder of --profile.trace")
    matches = ((RANK_FILE.fullmatch(path.name), path) for path in directory.iterdir())
    found = {int(match[1]): path for match, path in matches if match}
    if not found:
        raise ScheduleError(f"{directory} has no rank-N.json; pass the folder of --profile.trace")
    return dict(sorted(found.items()))


def read_rank(path: Path) -> RankTrace:
    """The trace in a rank's file. Raises ScheduleError for one that is cut off, or is something else."""
    try:
        document = read_json(path, ScheduleError)
    except OSError as error:
        raise ScheduleError(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise ScheduleError(f"{path} has format {found!r}, but this version reads {FORMAT!r}")
    try:
        fields = {name: document[name] for name in RankTrace.__dataclass_fields__}
        for name, declared in get_type_hints(RankTrace).items():
            if not is_of_type(fields[name], declared):
                raise ScheduleError(f"{path}: its {name} is {reprlib.repr(fields[name])}")
        return RankTrace(**(fields | {"events": [_event(row) for row in fields["events"]]}))
    except KeyError as error:
        raise ScheduleError(f"{path} lacks {error}") from None
    except DECODING_ERRORS as error:
        raise ScheduleError(f"{path} contains an invalid event: {error}") from None


def _event(row: Any) -> Event:
    event = Event(*row)
    if event.section not in SECTIONS or not all(isinstance(value, int) for value in (*event[1:3], *event[4:])):
        raise ValueError(f"{row}; its fields are {', '.join(Event._fields)}")
    return event
