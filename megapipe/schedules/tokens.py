"""One action as a word: how schedules are written, read and shown in errors.

A word is the kind's letters, then the columns in use, each behind its own mark: ``F2/0.7@0^1`` is the forward of unit
0 of stage 2 for micro-batch 7 on weight version 0, reading receive slot 1.
"""

import re
from typing import Final

from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.errors import ScheduleError

LETTERS: Final[dict[Kind, str]] = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "BI",
    Kind.BACKWARD_WEIGHT: "BW",
    Kind.RECOMPUTE: "R",
    Kind.SEND_ACTIVATION: "SA",
    Kind.RECV_ACTIVATION: "RA",
    Kind.SEND_GRADIENT: "SG",
    Kind.RECV_GRADIENT: "RG",
    Kind.GATHER_WEIGHTS: "GW",
    Kind.RELEASE_WEIGHTS: "LW",
    Kind.REDUCE_GRADIENTS: "DG",
    Kind.REDUCE_TIED: "DT",
    Kind.REDUCE_COUNTS: "DC",
    Kind.REDUCE_SCALARS: "DS",
    Kind.OFFLOAD: "OF",
    Kind.RELOAD: "RE",
    Kind.UPDATE: "U",
}
_KINDS: Final = {letters: kind for kind, letters in LETTERS.items()}
_MARKS: Final = ("", "/", ".", ":", "@", "^")
_WORD: Final = re.compile(r"([A-Z]+)(\d+)?(?:/(\d+))?(?:\.(\d+))?(?::(\d+))?(?:@(\d+))?(?:\^(\d+))?")
_LARGEST: Final = 2**31 - 1


def write_action(action: Action) -> str:
    """The action's word."""
    fields = zip(_MARKS, action[1:], strict=True)
    return LETTERS[Kind(action.kind)] + "".join(f"{mark}{value}" for mark, value in fields if value >= 0)


def read_action(word: str) -> Action:
    """The action of a word; raises ScheduleError that says what is wrong with the word."""
    match = _WORD.fullmatch(word)
    if match is None:
        raise ScheduleError(
            f"{word!r} is not an action: write KIND stage /unit .micro-batch :slice @version ^slot, as F2.7"
        )
    letters, *fields = match.groups()
    if letters not in _KINDS:
        raise ScheduleError(f"{letters!r} in {word!r} is not a kind of action; the kinds are {', '.join(_KINDS)}")
    values = [-1 if field is None else int(field) for field in fields]
    if max(values) > _LARGEST:
        raise ScheduleError(f"{max(values)} in {word!r} is too large: columns hold 32-bit integers")
    return Action(_KINDS[letters], *values)


def describe(action: Action) -> str:
    """The action in words, for errors."""
    names = ("stage", "unit", "micro-batch", "slice", "version", "slot")
    fields = (f"{name} {value}" for name, value in zip(names, action[1:], strict=True) if value >= 0)
    return " ".join([Kind(action.kind).name, ", ".join(fields)]).strip()
