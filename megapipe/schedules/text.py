"""The text form of a schedule: a header, then one line per rank in each section. Strict, and it round-trips.

    megapipe schedule 2
    name 1f1b
    microbatches 2
    stage 0 rank 0
    stage 1 rank 1
    body
    rank 0: F0.0 F0.1 B0.0 B0.1     # from a hash to the end of the line is a comment
    rank 1: F1.0 B1.0 F1.1 B1.1

Header lines (each at most once, ``name``, ``microbatches`` and the stages required; the rest as :class:`Header` says):
``name``, ``mode train|forward``, ``class A|B|C`` (by default the strongest that the order keeps,
:mod:`megapipe.schedules.validation.validate`; a stronger one is refused), ``microbatches``, ``slices`` of each,
``updates``, ``gradient_buffers``, ``weight_pool``, ``gradient_pool``, ``data_parallel yes|no``, ``lowered yes|no``;
``stage N rank R [part P] [replica R] [units U] [versions V] [activation_slots A] [gradient_slots G]``, ascending;
``route S S ...``; ``tied S S ...``; ``state S/L[-L] [weights sharded|host] [gradients sharded] [size N] [shards N]``:
a state unit of layer L of stage S, or of each layer of a range (`megapipe.schedules.states`); a layer without such a
line is one unit that is kept whole. Words are those of :mod:`megapipe.schedules.actions`, with ``:slice`` where there
are several; compute actions joined by a plus sign, ``F0.4+B1.2``, are one action whose rows overlap. A schedule of
compute actions alone (``lowered no``, the default) can be lowered.

Files of format 3 have parameters instead of numbers (:mod:`megapipe.schedules.parameters`).

Files of format 1 are read too. Instead of state lines and pools they have ``weight_buffers`` and ``whole_gradients``,
which shard all units, ``weights_in_host``, and ``zero Z Z ...``, by stage the ZeRO stage of each unit.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np

from megapipe.schedules.actions import Action, empty_rows, read_action, write_action
from megapipe.schedules.errors import DIGITS, ScheduleError, TextLine, split_lines
from megapipe.schedules.parameters import STATEMENTS, UNKNOWN, FileParameters, expand
from megapipe.schedules.schedule import SECTIONS, Header, Origin, RankLine, Schedule, SectionName, Sections, StagePlace
from megapipe.schedules.states import StateTable, StateUnit, WeightHome, check_number
from megapipe.schedules.table import Table
from megapipe.schedules.validation.validate import strongest_class

MAGIC: Final = "megapipe schedule"
FORMAT_VERSION: Final = 2
WITH_PARAMETERS: Final = 3
"""The format of files for any number of ranks and micro-batches."""

_NUMBERS: Final = {
    "microbatches": "num_microbatches",
    "slices": "slices",
    "updates": "updates_per_step",
    "gradient_buffers": "gradient_buffers",
    "weight_pool": "weight_pool",
    "gradient_pool": "gradient_pool",
}
_POOLS: Final = ("weight_pool", "gradient_pool")
_FLAGS: Final = ("data_parallel", "lowered")
_VERSION_1_POOLS: Final = {"weight_buffers": "weight_pool", "whole_gradients": "gradient_pool"}
"""Numbers of format 1 that were also flags: with a number above 0, weights or gradients of all units were sharded."""
_CHOICES: Final = {"mode": ("mode", ("train", "forward")), "class": ("numerical_class", ("A", "B", "C"))}
_STAGE_FIELDS: Final = {
    "rank": None,
    "part": None,
    "replica": 0,
    "units": 1,
    "versions": 1,
    "activation_slots": 0,
    "gradient_slots": 0,
}
_STATE_CHOICES: Final = {"weights": ("sharded", "host"), "gradients": ("sharded",)}
_STATE_NUMBERS: Final = ("size", "shards")
_AT_LEAST_ONE: Final = ("units", "versions", "microbatches", "slices", "updates", "gradient_buffers")
_KEYS: Final = ("name", *_CHOICES, *_NUMBERS, *_FLAGS, "stage", "route", "vocabulary", "tied", "state")
_VERSION_1_KEYS: Final = (
    *(key for key in _KEYS if key not in (*_POOLS, "state")),
    *_VERSION_1_POOLS,
    "weights_in_host",
    "zero",
)


def write_header(header: Header) -> list[str]:
    """Return the header as lines, without values that are the default, except the class."""
    defaults = {each.name: each.default for each in (*fields(StateTable), *fields(Header))}
    lines = [f"{MAGIC} {FORMAT_VERSION}", f"name {header.name}", f"class {header.numerical_class}"]
    if header.mode != "train":
        lines.append(f"mode {header.mode}")
    for key, field in _NUMBERS.items():
        value = getattr(header.states if field in _POOLS else header, field)
        value = header.whole_microbatches if key == "microbatches" else value
        if value != defaults[field]:
            lines.append(f"{key} {value}")
    lines += [f"{key} yes" for key in _FLAGS if getattr(header, key)]
    no_slots = (0,) * len(header.stages)
    slots = header.activation_slots or no_slots, header.gradient_slots or no_slots
    columns = zip(header.stages, header.units_per_stage, header.versions_per_stage, *slots, strict=True)
    for stage, (place, *numbers) in enumerate(columns):
        usual = (_STAGE_FIELDS | {"part": stage}).items()
        values = zip(usual, (place.rank, place.part, place.replica, *numbers), strict=True)
        words = (f"{key} {value}" for (key, default), value in values if value != default)
        lines.append(" ".join([f"stage {stage}", *words]))
    if header.routes != (tuple(range(header.num_routed)),):
        lines += ["route " + " ".join(map(str, route)) for route in header.routes]
    lines += ["vocabulary " + " ".join(map(str, header.vocabulary))] * bool(header.vocabulary)
    lines += ["tied " + " ".join(map(str, group)) for group in header.tied_groups]
    return lines + [line for stage, units in enumerate(header.states.units) for line in _state_lines(stage, units)]


def _state_lines(stage: int, units: Sequence[StateUnit]) -> Iterator[str]:
    """Yield lines for the first units of all layers, one line for equal neighbours; then for the second units, and so
    on."""
    seen: Counter[int] = Counter()
    turns: defaultdict[int, list[StateUnit]] = defaultdict(list)
    for unit in units:
        turns[seen[unit.layer]].append(unit)
        seen[unit.layer] += 1
    for alike in turns.values():
        for _, run in groupby(enumerate(alike), key=lambda each: (each[1].layer - each[0], each[1][1:])):
            same = [unit for _, unit in run]
            layers = f"{same[0].layer}-{same[-1].layer}" if len(same) > 1 else f"{same[0].layer}"
            fields = [f"state {stage}/{layers}"]
            fields += [f"weights {same[0].weights}"] * (same[0].weights != "whole")
            fields += ["gradients sharded"] * same[0].sharded_gradients
            fields += [f"size {same[0].size}"] * (same[0].size != 1)
            yield " ".join(fields + [f"shards {same[0].shards}"] * (same[0].shards != 0))


class HeaderReader:
    """Collects header lines into a :class:`Header`."""

    def __init__(self, first: TextLine) -> None:
        self._version = first.number_at(2)
        if self._version not in (1, FORMAT_VERSION, WITH_PARAMETERS):
            raise first.error(
                first.words[2],
                f"format {first.words[2].text} cannot be read; this version "
                f"reads formats 1, {FORMAT_VERSION} and {WITH_PARAMETERS}",
            )
        first.expect_length(3)
        self.lines: dict[str, TextLine] = {}
        self._fields: dict[str, Any] = {}
        self._stages: list[dict[str, int]] = []
        self._num_units = 0
        self._lists: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._states: defaultdict[int, list[StateUnit]] = defaultdict(list)

    def read(self, line: TextLine) -> None:
        """Read one header line."""
        key = line.words[0].text
        keys = _KEYS if self._version > 1 else _VERSION_1_KEYS
        if key not in keys:
            nearest = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it must be one of {', '.join(keys)}"
            if self._version < WITH_PARAMETERS and key in STATEMENTS:
                hint = f"; a file with parameters starts with '{MAGIC} {WITH_PARAMETERS}'"
            raise line.error(line.words[0], f"unknown header line {key!r}{hint}")
        self.lines.setdefault(key, line)
        if key == "stage":
            self._read_stage(line)
        elif key in ("route", "tied"):
            self._lists[key].append(self._stage_list(line))
        elif key == "vocabulary":
            self._fields[key] = self._stage_list(line)
        elif key == "zero":
            self._lists[key].append(tuple(line.number_at(index) for index in range(1, max(2, len(line.words)))))
        elif key == "state":
            self._read_states(line)
        elif key in _NUMBERS | _VERSION_1_POOLS:
            field = (_NUMBERS | _VERSION_1_POOLS)[key]
            self._once(line, field, line.number_at(1, least=1 if key in _AT_LEAST_ONE else 0))
        elif key in (*_FLAGS, "weights_in_host"):
            self._once(line, key, line.choice_at(1, ("yes", "no")) == "yes")
        elif key in _CHOICES:
            field, choices = _CHOICES[key]
            self._once(line, field, line.choice_at(1, choices))
        else:
            line.expect_length(2)
            self._once(line, "name", line.words[1].text)

    def finish(self, source: str) -> Header:
        """Return the header that the lines describe."""
        for key, usual in (("name", "name mine"), ("num_microbatches", "microbatches 4")):
            if key not in self._fields:
                word = usual.split()[0]
                raise ScheduleError(f"{source}: the header lacks {word!r}; add a line such as '{usual}'")
        if not self._stages:
            raise ScheduleError(f"{source}: the header has no stage; add lines such as 'stage 0 rank 0'")
        column = {key: tuple(stage[key] for stage in self._stages) for key in _STAGE_FIELDS}
        ranks, units = set(column["rank"]), column["units"]
        if ranks != set(range(len(ranks))):
            line = self.lines["stage"]
            raise line.error(line.words[0], f"stages are on ranks {sorted(ranks)}; number them from 0 with no gaps")
        fields: dict[str, Any] = {"mode": "train", "numerical_class": "C", "lowered": False} | self._fields
        if fields["num_microbatches"] % fields.get("updates_per_step", 1):
            line = self.lines["updates"]
            raise line.error(
                line.words[1],
                f"{fields['num_microbatches']} micro-batches cannot be divided evenly into "
                f"{fields['updates_per_step']} updates; change one of the two",
            )
        fields["num_microbatches"] *= fields.get("slices", 1)
        if fields["lowered"]:
            fields |= {key: column[key] for key in ("activation_slots", "gradient_slots")}
        pools = {pool: fields.pop(pool, 0) for pool in _POOLS}
        states = (
            self._version_1_states(units, fields, pools) if self._version == 1 else self._named_states(units, pools)
        )
        routed = len(self._stages) - len(fields.get("vocabulary", ()))
        return Header(
            num_ranks=len(ranks),
            stages=tuple(map(StagePlace, column["part"], column["replica"], column["rank"])),
            routes=tuple(self._lists["route"]) or (tuple(range(routed)),),
            units_per_stage=units,
            versions_per_stage=column["versions"],
            tied_groups=tuple(self._lists["tied"]),
            states=states.checked(fields["name"], units),
            **fields,
        )

    def _named_states(self, layers_per_stage: Sequence[int], pools: dict[str, int]) -> StateTable:
        """Return the table that the state lines describe; a layer without a line is one unit that is kept whole."""
        units = []
        for stage, layers in enumerate(layers_per_stage):
            named = self._states[stage]
            unnamed = sorted(set(range(layers)) - {unit.layer for unit in named})
            units.append(tuple(sorted([*named, *map(StateUnit, unnamed)], key=lambda unit: unit.layer)))
        return StateTable(tuple(units), **pools)

    def _version_1_states(
        self, layers_per_stage: Sequence[int], fields: dict[str, Any], pools: dict[str, int]
    ) -> StateTable:
        """Return the table that the scalars of format 1 and its lines of ZeRO stages describe."""
        home: WeightHome = "host" if fields.pop("weights_in_host", False) else "sharded"
        zero = self._lists["zero"]
        if zero and any(pools.values()) and tuple(map(len, zero)) != tuple(layers_per_stage):
            raise ScheduleError(
                f"{fields['name']} has ZeRO stages of {list(map(len, zero))} units by stage, "
                f"but stages have {list(layers_per_stage)} units; give one for each unit"
            )
        return StateTable.uniform(layers_per_stage, **pools, weights=home, zero=zero)

    def _once(self, line: TextLine, field: str, value: object) -> None:
        line.expect_length(2)
        if field in self._fields:
            raise line.error(line.words[0], f"{line.words[0].text!r} appears twice; remove one of the two lines")
        self._fields[field] = value

    def _read_stage(self, line: TextLine) -> None:
        number = len(self._stages)
        if line.number_at(1) != number:
            raise line.error(line.words[1], f"stages must be numbered from 0 in order: expected stage {number}")
        values = {
            key: line.number_at(at, least=1 if key in _AT_LEAST_ONE else 0) for key, at in _pairs(line, _STAGE_FIELDS)
        }
        if "rank" not in values:
            raise line.error(line.words[1], f"stage {number} has no rank; write 'stage {number} rank R'")
        defaults = {key: number if value is None else value for key, value in _STAGE_FIELDS.items()}
        self._stages.append(defaults | values)
        self._num_units += self._stages[-1]["units"]
        check_number(self._num_units)

    def _read_states(self, line: TextLine) -> None:
        """Read ``state S/L`` or ``state S/L-L``, then the values of the unit of each of these layers that are not
        defaults."""
        text = line.words[1].text if len(line.words) > 1 else ""
        match = re.fullmatch(rf"({DIGITS})/({DIGITS})(?:-({DIGITS}))?", text)
        if match is None:
            raise line.error(line.words[-1], "a stage and its layers must follow, such as 0/2 or 0/2-5")
        stage, first, last = (
            line.whole_number(line.words[1], each) for each in (match[1], match[2], match[3] or match[2])
        )
        if stage >= len(self._stages) or not first <= last < self._stages[stage]["units"]:
            raise line.error(line.words[1], f"{line.words[1].text!r} does not name layers of a stage defined above")
        values: dict[str, Any] = {
            key: line.number_at(at) if key in _STATE_NUMBERS else line.one_of(at, _STATE_CHOICES[key])
            for key, at in _pairs(line, (*_STATE_CHOICES, *_STATE_NUMBERS))
        }
        values["sharded_gradients"] = values.pop("gradients", "whole") == "sharded"
        self._states[stage] += [StateUnit(layer, **values) for layer in range(first, last + 1)]

    def _stage_list(self, line: TextLine) -> tuple[int, ...]:
        stages = tuple(line.number_at(index) for index in range(1, max(2, len(line.words))))
        for index, stage in enumerate(stages, start=1):
            if stage >= len(self._stages):
                raise line.error(line.words[index], f"stage {stage} is not defined above; add 'stage {stage} rank R'")
        if len(set(stages)) < len(stages) and line.words[0].text == "route":
            raise line.error(line.words[0], "a route must visit each stage once")
        return stages


def _pairs(line: TextLine, keys: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield each key of a line from its third word on, and the index of its value."""
    seen = set()
    for index in range(2, len(line.words), 2):
        key = line.words[index].text
        if key not in keys or key in seen:
            raise line.error(line.words[index], f"{key!r} is not one of {', '.join(keys)}, or appears twice")
        seen.add(key)
        yield key, index + 1


def dumps(schedule: Schedule) -> str:
    """Return the schedule as text.

    Example:
        >>> from megapipe import build, dumps
        >>> dumps(build("gpipe", 2, 4)).splitlines()[0]
        'megapipe schedule 2'
    """
    lines = write_header(schedule.header)
    for section in SECTIONS:
        if any(len(rows) for rows in schedule.sections[section]):
            lines += ["", section]
            lines += [
                " ".join([f"rank {rank}:", *_words(schedule.actions(section, rank), schedule.header.slices)])
                for rank in range(schedule.header.num_ranks)
            ]
    return "\n".join(lines) + "\n"


def loads(text: str, source: str = "schedule", sizes: FileParameters = UNKNOWN) -> Schedule:
    """Return the schedule that a text describes.

    ``source`` names the text in errors. ``sizes`` are those of the run, for a text with parameters. Raises
    ScheduleError with the line and column of the error.

    Example:
        >>> from megapipe import build, dumps, loads
        >>> schedule = build("zb_h1", 2, 4)
        >>> loads(dumps(schedule)) == schedule
        True
    """
    lines, reader, header = _read_header(text, source, sizes)
    starts = [index for index, line in enumerate(lines) if line.words[0].text in SECTIONS]
    sections_read: dict[SectionName, list[RankLine]] = {}
    for start, end in pairwise([*starts, len(lines)]):
        name = _section_name(lines[start], sections_read)
        sections_read[name] = _read_ranks(lines[start], lines[start + 1 : end], header.num_ranks, header.slices)
    if "body" not in sections_read:
        raise ScheduleError(f"{source}: the section 'body' is missing; add 'body', and 'rank R: ...' for each rank")
    empty = tuple(empty_rows() for _ in range(header.num_ranks))
    rows = {name: tuple(each.rows for each in rows) for name, rows in sections_read.items()}
    sections = Sections(rows.get("prologue", empty), rows["body"], rows.get("epilogue", empty))
    placed = {(name, rank): each for name, rows in sections_read.items() for rank, each in enumerate(rows)}
    numbers = {key: line.number for key, line in reader.lines.items()}
    origin = Origin(lines[-1].source, lines[0].file, numbers, placed)
    schedule = Schedule(header, sections, origin)
    if "class" in reader.lines:
        return schedule
    table = Table.unroll(schedule, schedule.prologue_steps + 1)
    return replace(schedule, header=replace(header, numerical_class=strongest_class(table)[0]))


def loads_header(text: str, source: str, sizes: FileParameters) -> Header:
    """Return the header of a text, without its rows; what a text with parameters requires of the run is not
    checked."""
    return _read_header(text, source, sizes, header_only=True)[2]


def has_parameters(text: str) -> bool:
    """Return whether a text is for any number of ranks and micro-batches."""
    first = next(split_lines(text, ""), None)
    return first is not None and first.text.split() == f"{MAGIC} {WITH_PARAMETERS}".split()


def _read_header(
    text: str, source: str, sizes: FileParameters, header_only: bool = False
) -> tuple[list[TextLine], HeaderReader, Header]:
    """Return the lines of a text, with values instead of parameters, the reader of its header, and the header."""
    lines = list(split_lines(text, source))
    if not lines or lines[0].text.split()[:2] != MAGIC.split():
        raise ScheduleError(f"{source}: the first line must be '{MAGIC} {FORMAT_VERSION}'")
    reader, line_of_ranks = HeaderReader(lines[0]), None
    if has_parameters(text):
        lines, line_of_ranks = expand(lines, source, sizes, header_only)
    elif sizes.options:
        raise ScheduleError(
            f"{source} is a file without parameters, which takes no options, but {', '.join(sizes.options)} was "
            "given; leave it out, name a schedule, or declare the option in a file of format 3"
        )
    for line in lines[1:]:
        if line.words[0].text in SECTIONS:
            break
        reader.read(line)
    header = reader.finish(source)
    if line_of_ranks is not None and header.num_ranks != sizes.ranks:
        raise line_of_ranks.error(
            line_of_ranks.words[0],
            f"the run has {sizes.ranks} ranks, but the stages are on "
            f"ranks 0 to {header.num_ranks - 1}; change the ranks of the stages",
        )
    return lines, reader, header


def _words(actions: Iterable[Action], slices: int) -> Iterator[str]:
    """Yield one word for each action; rows of one group are joined by a plus sign."""
    for group, rows in groupby(actions, key=lambda action: action.group):
        words = (write_action(action, slices) for action in rows)
        yield from words if group < 0 else ["+".join(words)]


def _section_name(line: TextLine, earlier_sections: Collection[SectionName]) -> SectionName:
    line.expect_length(1)
    name = next(name for name in SECTIONS if name == line.words[0].text)
    if earlier_sections and SECTIONS.index(name) <= max(SECTIONS.index(earlier) for earlier in earlier_sections):
        raise line.error(line.words[0], f"section {name!r} is repeated or out of order ({', '.join(SECTIONS)})")
    return name


def _read_ranks(start: TextLine, lines: list[TextLine], num_ranks: int, slices: int) -> list[RankLine]:
    for rank, line in enumerate(lines):
        if rank == num_ranks:
            raise line.error(line.words[0], f"the stages are on {num_ranks} ranks, but this is one more; remove it")
        if [word.text for word in line.words[:2]] != ["rank", f"{rank}:"]:
            raise line.error(line.words[0], f"expected 'rank {rank}:' and its actions")
    if len(lines) < num_ranks:
        raise start.error(
            start.words[0],
            f"the section has {len(lines)} rank lines, but the stages are "
            f"on {num_ranks} ranks; add the line 'rank {len(lines)}: ...'",
        )
    return [_read_rank(line, slices) for line in lines]


def _read_rank(line: TextLine, slices: int) -> RankLine:
    actions: list[Action] = []
    places: list[tuple[int, int]] = []
    groups = 0
    for word in line.words[2:]:
        action_words = word.text.split("+")
        group, groups = (groups, groups + 1) if len(action_words) > 1 else (-1, groups)
        try:
            actions += [read_action(action_word, slices)._replace(group=group) for action_word in action_words]
        except ScheduleError as error:
            raise line.error(word, str(error)) from None
        column = word.column
        for action_word in action_words:
            places.append((word.line or line.number, column))
            column += (len(action_word) + 1) * (word.line == 0)
    rows = np.array(actions, dtype=np.int32) if actions else empty_rows()
    return RankLine(line.number, rows, np.array(places, dtype=np.int32).reshape(-1, 2))
