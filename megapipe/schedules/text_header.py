"""The header lines of the text form."""

import difflib
from dataclasses import fields
from typing import Any, Final

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import FORMAT_VERSION, Header, StagePlace
from megapipe.schedules.words import TextLine

MAGIC: Final = "megapipe schedule"

_NUMBERS: Final = {
    "microbatches": "num_microbatches",
    "updates": "updates_per_step",
    "gradient_buffers": "gradient_buffers",
    "weight_buffers": "weight_buffers",
    "whole_gradients": "whole_gradients",
}
_FLAGS: Final = ("data_parallel", "weights_in_host", "lowered")
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
_AT_LEAST_ONE: Final = ("units", "versions", "microbatches", "updates", "gradient_buffers")
_KEYS: Final = ("name", *_CHOICES, *_NUMBERS, *_FLAGS, "stage", "route", "tied", "zero")


def write_header(header: Header) -> list[str]:
    """Return the header as lines, without values that are the default, except the class."""
    defaults = {each.name: each.default for each in fields(Header)}
    lines = [f"{MAGIC} {header.format_version}", f"name {header.name}", f"class {header.numerical_class}"]
    if header.mode != "train":
        lines.append(f"mode {header.mode}")
    numbers = ((key, field, getattr(header, field)) for key, field in _NUMBERS.items())
    lines += [f"{key} {value}" for key, field, value in numbers if value != defaults[field]]
    lines += [f"{key} yes" for key in _FLAGS if getattr(header, key)]
    for stage, place in enumerate(header.stages):
        said = {
            "rank": place.rank,
            "part": place.part,
            "replica": place.replica,
            "units": header.units_per_stage[stage],
            "versions": header.versions_per_stage[stage],
            "activation_slots": header.activation_slots[stage] if header.activation_slots else 0,
            "gradient_slots": header.gradient_slots[stage] if header.gradient_slots else 0,
        }
        usual = _STAGE_FIELDS | {"part": stage}
        words = (f"{key} {value}" for key, value in said.items() if value != usual[key])
        lines.append(" ".join([f"stage {stage}", *words]))
    if header.routes != (tuple(range(len(header.stages))),):
        lines += ["route " + " ".join(map(str, route)) for route in header.routes]
    lines += ["tied " + " ".join(map(str, group)) for group in header.tied_groups]
    lines += ["zero " + " ".join(map(str, stages)) for stages in header.zero_stages]
    return lines


class HeaderReader:
    """Collects header lines into a :class:`Header`."""

    def __init__(self, first: TextLine) -> None:
        if first.number_at(2) != FORMAT_VERSION:
            raise first.error(
                first.words[2],
                f"format {first.words[2].text} cannot be read; this version reads format {FORMAT_VERSION}",
            )
        first.expect_length(3)
        self._fields: dict[str, Any] = {}
        self._stages: list[dict[str, int]] = []
        self._routes: list[tuple[int, ...]] = []
        self._tied: list[tuple[int, ...]] = []
        self._zero: list[tuple[int, ...]] = []

    def read(self, line: TextLine) -> None:
        """Take in one header line."""
        key = line.words[0].text
        if key == "stage":
            self._read_stage(line)
        elif key == "route":
            self._routes.append(self._stage_list(line))
        elif key == "tied":
            self._tied.append(self._stage_list(line))
        elif key == "zero":
            self._zero.append(tuple(line.number_at(index) for index in range(1, max(2, len(line.words)))))
        elif key in _NUMBERS:
            self._once(line, _NUMBERS[key], line.number_at(1, least=1 if key in _AT_LEAST_ONE else 0))
        elif key in _FLAGS:
            self._once(line, key, line.choice_at(1, ("yes", "no")) == "yes")
        elif key in _CHOICES:
            field, choices = _CHOICES[key]
            self._once(line, field, line.choice_at(1, choices))
        elif key == "name":
            line.expect_length(2)
            self._once(line, "name", line.words[1].text)
        else:
            nearest = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it must be one of {', '.join(_KEYS)}"
            raise line.error(line.words[0], f"unknown header line {key!r}{hint}")

    def finish(self, source: str) -> Header:
        """The header that the lines make."""
        for key in ("name", "num_microbatches"):
            if key not in self._fields:
                raise ScheduleError(f"{source}: the header lacks '{key.removeprefix('num_')}'")
        if not self._stages:
            raise ScheduleError(f"{source}: the header has no stage")
        ranks = {stage["rank"] for stage in self._stages}
        if ranks != set(range(len(ranks))):
            raise ScheduleError(
                f"{source}: the stages are on ranks {sorted(ranks)}; ranks must be numbered from 0 without gaps"
            )
        fields: dict[str, Any] = {"mode": "train", "numerical_class": "C", "lowered": False} | self._fields
        if fields["num_microbatches"] % fields.get("updates_per_step", 1):
            raise ScheduleError(
                f"{source}: {fields['num_microbatches']} micro-batches cannot be divided evenly into "
                f"{fields['updates_per_step']} updates"
            )
        slots: dict[str, Any] = {
            key: tuple(stage[key] for stage in self._stages) if fields["lowered"] else ()
            for key in ("activation_slots", "gradient_slots")
        }
        return Header(
            num_ranks=len(ranks),
            stages=tuple(StagePlace(stage["part"], stage["replica"], stage["rank"]) for stage in self._stages),
            routes=tuple(self._routes) or (tuple(range(len(self._stages))),),
            units_per_stage=tuple(stage["units"] for stage in self._stages),
            versions_per_stage=tuple(stage["versions"] for stage in self._stages),
            tied_groups=tuple(self._tied),
            zero_stages=tuple(self._zero),
            **fields,
            **slots,
        )

    def _once(self, line: TextLine, field: str, value: object) -> None:
        line.expect_length(2)
        if field in self._fields:
            raise line.error(line.words[0], f"{line.words[0].text!r} appears twice")
        self._fields[field] = value

    def _read_stage(self, line: TextLine) -> None:
        number = len(self._stages)
        if line.number_at(1) != number:
            raise line.error(line.words[1], f"stages must be numbered from 0 in order: expected stage {number}")
        given: dict[str, int] = {}
        for index in range(2, len(line.words), 2):
            key = line.words[index].text
            if key not in _STAGE_FIELDS or key in given:
                raise line.error(
                    line.words[index], f"{key!r} is not one of {', '.join(_STAGE_FIELDS)}, or appears twice"
                )
            given[key] = line.number_at(index + 1, least=1 if key in _AT_LEAST_ONE else 0)
        if "rank" not in given:
            raise line.error(line.words[1], f"stage {number} has no rank")
        defaults = {key: number if value is None else value for key, value in _STAGE_FIELDS.items()}
        self._stages.append(defaults | given)

    def _stage_list(self, line: TextLine) -> tuple[int, ...]:
        stages = tuple(line.number_at(index) for index in range(1, max(2, len(line.words))))
        for index, stage in enumerate(stages, start=1):
            if stage >= len(self._stages):
                raise line.error(line.words[index], f"stage {stage} is not defined above")
        if len(set(stages)) < len(stages) and line.words[0].text == "route":
            raise line.error(line.words[0], "a route must visit each stage once")
        return stages
