"""The text form of a schedule: a header, then one line per rank in each section. Strict, and it round-trips.

    megapipe schedule 1
    name 1f1b
    microbatches 2
    stage 0 rank 0
    stage 1 rank 1
    body
    rank 0: F0.0 F0.1 B0.0 B0.1     # from a hash to the end of the line is a comment
    rank 1: F1.0 B1.0 F1.1 B1.1

Header lines (each at most once, ``name``, ``microbatches`` and the stages required; the rest as :class:`Header` says):
``name``, ``mode train|forward``, ``class A|B|C``, ``microbatches``, ``updates``, ``gradient_buffers``,
``data_parallel yes|no``, ``lowered yes|no``; ``stage N rank R [part P] [replica R] [units U] [versions V]
[activation_slots A] [gradient_slots G]``, ascending; ``route S S ...``; ``tied S S ...``. Words are those of
:mod:`megapipe.schedules.tokens`. A schedule of compute actions alone (``lowered no``, the default) can be lowered.
"""

from itertools import pairwise

import numpy as np

from megapipe.schedules.actions import Action, Rows, empty_rows
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import SECTIONS, Origin, Schedule, SectionName, Sections
from megapipe.schedules.text_header import MAGIC, HeaderReader, write_header
from megapipe.schedules.tokens import read_action, write_action
from megapipe.schedules.words import TextLine, split_lines


def dumps(schedule: Schedule) -> str:
    """The schedule as text."""
    lines = write_header(schedule.header)
    for section in SECTIONS:
        if any(len(rows) for rows in schedule.sections[section]):
            lines += ["", section, *_write_ranks(schedule, section)]
    return "\n".join(lines) + "\n"


def loads(text: str, source: str = "schedule") -> Schedule:
    """The schedule that a text describes.

    ``source`` names the text in errors. Raises ScheduleError with line and column of what does not belong.
    """
    lines = list(split_lines(text, source))
    if not lines or not lines[0].text.startswith(MAGIC):
        raise ScheduleError(f"{source}: the first line must be '{MAGIC} 1'")
    reader = HeaderReader(lines[0])
    starts = [index for index, line in enumerate(lines) if line.words[0].text in SECTIONS]
    for line in lines[1 : starts[0] if starts else len(lines)]:
        reader.read(line)
    header = reader.finish(source)
    found: dict[SectionName, tuple[Rows, ...]] = {}
    numbers: dict[tuple[SectionName, int], int] = {}
    for start, end in pairwise([*starts, len(lines)]):
        name = _section_name(lines[start], found)
        found[name] = _read_ranks(lines[start], lines[start + 1 : end], header.num_ranks)
        numbers |= {(name, rank): line.number for rank, line in enumerate(lines[start + 1 : end])}
    if "body" not in found:
        raise ScheduleError(f"{source}: the section 'body' is missing")
    empty = tuple(empty_rows() for _ in range(header.num_ranks))
    sections = Sections(found.get("prologue", empty), found["body"], found.get("epilogue", empty))
    return Schedule(header, sections, Origin(source, numbers))


def _write_ranks(schedule: Schedule, section: SectionName) -> list[str]:
    return [
        " ".join([f"rank {rank}:", *(write_action(action) for action in schedule.actions(section, rank))])
        for rank in range(schedule.header.num_ranks)
    ]


def _section_name(line: TextLine, found: dict[SectionName, tuple[Rows, ...]]) -> SectionName:
    line.expect_length(1)
    name = next(name for name in SECTIONS if name == line.words[0].text)
    if found and SECTIONS.index(name) <= max(SECTIONS.index(earlier) for earlier in found):
        raise line.error(
            line.words[0], f"section {name!r} is repeated or out of order; the order is {', '.join(SECTIONS)}"
        )
    return name


def _read_ranks(start: TextLine, lines: list[TextLine], num_ranks: int) -> tuple[Rows, ...]:
    for rank, line in enumerate(lines):
        if rank == num_ranks:
            raise line.error(line.words[0], f"the stages are on {num_ranks} ranks, but this is one line more")
        if [word.text for word in line.words[:2]] != ["rank", f"{rank}:"]:
            raise line.error(line.words[0], f"expected 'rank {rank}:' and its actions")
    if len(lines) < num_ranks:
        raise start.error(
            start.words[0], f"the section has {len(lines)} rank lines, but the stages are on {num_ranks} ranks"
        )
    return tuple(_read_rank(line) for line in lines)


def _read_rank(line: TextLine) -> Rows:
    actions: list[Action] = []
    for word in line.words[2:]:
        try:
            actions.append(read_action(word.text))
        except ScheduleError as error:
            raise line.error(word, str(error)) from None
    return np.array(actions, dtype=np.int32) if actions else empty_rows()
