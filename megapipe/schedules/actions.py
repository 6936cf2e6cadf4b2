"""The words of the schedule language: action kinds, the columns they are stored in, and the view of one row.

A schedule is a table of int32 rows, one row an action, -1 where a column does not apply:

* ``kind``: a :class:`Kind`.
* ``stage``: the stage on this rank that the action belongs to.
* ``unit``: index of a unit within the stage; -1 is the whole chunk (or not applicable).
* ``microbatch``: the micro-batch, counted from the first one of the body's step. Reductions and updates name the last
  one they include. Slices of a sequence are neighbouring micro-batches (`Header.slices`); words name both.
* ``version``: weight version that a compute action reads, or that ``UPDATE`` produces, counted from the body's step.
* ``slot``: the stage's receive buffer that a receive fills or a compute action reads.
* ``group``: neighbouring compute rows with the same value of at least 0 are one action, such as a forward and a
  backward of two micro-batches that overlap. It starts when all of its rows can start, and runs them in their order.

A group of a forward and a backward is a pair (`pairs_of`): its halves may run at the same time on two streams of a
GPU.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from itertools import groupby
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megapipe.schedules.errors import ScheduleError

Rows = npt.NDArray[np.int32]
"""Actions of one rank, shape [actions, len(COLUMNS)]."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

COLUMNS: Final = ("kind", "stage", "unit", "microbatch", "version", "slot", "group")
KIND, STAGE, UNIT, MICROBATCH, VERSION, SLOT, GROUP = range(len(COLUMNS))


class Kind(IntEnum):
    """The kind of an action, with its word in texts. Communication kinds mark the start; the action that needs the
    result waits for it."""

    letters: str

    def __new__(cls, number: int, letters: str = "") -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.letters = number, letters
        return kind

    FORWARD = 0, "F"
    BACKWARD = 1, "B"
    BACKWARD_INPUT = 2, "BI"
    BACKWARD_WEIGHT = 3, "BW"
    RECOMPUTE = 4, "R"
    SEND_ACTIVATION = 5, "SA"
    RECV_ACTIVATION = 6, "RA"
    SEND_GRADIENT = 7, "SG"
    RECV_GRADIENT = 8, "RG"
    GATHER_WEIGHTS = 9, "GW"
    RELEASE_WEIGHTS = 10, "LW"
    REDUCE_GRADIENTS = 11, "DG"
    REDUCE_TIED = 12, "DT"
    REDUCE_COUNTS = 13, "DC"
    REDUCE_SCALARS = 14, "DS"
    OFFLOAD = 15, "OF"
    RELOAD = 16, "RE"
    UPDATE = 17, "U"
    SNAPSHOT = 18, "SS"


COMPUTE_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""The kinds that a generator may write; lowering adds the rest."""

BACKWARDS: Final = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The kinds that make the gradient of a stage's input."""

GRADIENT_KINDS: Final = (*BACKWARDS, Kind.BACKWARD_WEIGHT)
"""The kinds of backward compute."""

ADDING: Final = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""The kinds that add to the gradients of a layer's weights."""

SENDS: Final = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES: Final = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
SUMS_OF_RANKS: Final = (Kind.REDUCE_TIED, Kind.REDUCE_SCALARS, Kind.REDUCE_COUNTS)
"""Collectives over pipeline ranks: sums of tied gradients, of losses, norms and flags, and of token counts."""

COMPUTE_STREAM: Final = (*COMPUTE_KINDS, Kind.RECOMPUTE)
"""The kinds that compute with a model's layers: forwards, backwards and recomputation."""


class Action(NamedTuple):
    """View of one row of a schedule; the fields are the columns, in their order."""

    kind: Kind
    stage: int = -1
    unit: int = -1
    microbatch: int = -1
    version: int = -1
    slot: int = -1
    group: int = -1


def rows_of(
    kind: int | Ints | Rows,
    stage: int | Ints | Rows = -1,
    microbatch: int | Ints | Rows = -1,
    *,
    unit: int | Ints | Rows = -1,
    version: int | Ints | Rows = -1,
) -> Rows:
    """Return rows made from columns; numbers and arrays broadcast against each other. Shape [..., len(COLUMNS)]."""
    columns = (kind, stage, unit, microbatch, version, -1, -1)
    shape = np.broadcast(kind, stage, unit, microbatch, version).shape or (1,)
    rows = np.empty((*shape, len(COLUMNS)), dtype=np.int32)
    for number, column in enumerate(columns):
        rows[..., number] = column
    return rows


def repeats(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for a table that repeats each row by its count, each entry's row and its number among the row's own."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)


def empty_rows() -> Rows:
    """Return a table without actions: shape [0, len(COLUMNS)]."""
    return np.empty((0, len(COLUMNS)), dtype=np.int32)


def kind_mask(kinds: Rows, *wanted: Kind) -> Mask:
    """Return which entries of a kind column are one of ``wanted``, in the shape of the column."""
    return _members(wanted).take(kinds)


@cache
def _members(wanted: tuple[Kind, ...]) -> Mask:
    """Return for each kind whether it is one of ``wanted``."""
    members = np.zeros(len(Kind), dtype=np.bool_)
    members[list(wanted)] = True
    return members


_KINDS: Final = {kind.letters: kind for kind in Kind}
_MARKS: Final = ("", "/", ".", ":", "@", "^")
_WORD: Final = re.compile(r"([A-Z]+)(\d+)?(?:/(\d+))?(?:\.(\d+))?(?::(\d+))?(?:@(\d+))?(?:\^(\d+))?", re.ASCII)
_LARGEST: Final = 2**31 - 1
"""Largest number of a row, whose type is int32."""


def write_action(action: Action, slices: int = 1) -> str:
    """Return the word for an action. slices: number of slices of each micro-batch, as in `Header.slices`."""
    fields = zip(_MARKS, _fields(action, slices)[:-1], strict=True)
    return Kind(action.kind).letters + "".join(f"{mark}{value}" for mark, value in fields if value >= 0)


def short_word(action: Action, slices: int = 1) -> str:
    """Return the word for an action without what lowering adds to it: version and slot."""
    return write_action(action._replace(version=-1, slot=-1), slices)


def _fields(action: Action, slices: int) -> tuple[int, ...]:
    """Return stage, unit, micro-batch, slice (-1 for none), version, slot and group."""
    sliced = slices > 1 and action.microbatch >= 0
    microbatch = divmod(action.microbatch, slices) if sliced else (action.microbatch, -1)
    return (*action[1:3], *microbatch, *action[4:])


def read_action(word: str, slices: int = 1) -> Action:
    """Return the action that a word names; raises ScheduleError if it names none. slices: as in `write_action`."""
    match = _WORD.fullmatch(word)
    if match is None:
        raise ScheduleError(
            f"{word!r} is not an action: write KIND stage /unit .micro-batch :slice @version ^slot, as F2.7"
        )
    letters, *fields = match.groups()
    if letters not in _KINDS:
        raise ScheduleError(f"{letters!r} in {word!r} is not a kind of action; the kinds are {', '.join(_KINDS)}")
    values = [-1 if field is None else int(field) for field in fields]
    if max(values) > _LARGEST // slices:
        raise ScheduleError(f"{max(values)} in {word!r} is too large; the maximum is {_LARGEST // slices}")
    stage, unit, microbatch, index, *rest = values
    if slices > 1 and microbatch >= 0:
        if not 0 <= index < slices:
            raise ScheduleError(f"{word!r} must name a slice from 0 to {slices - 1} of its micro-batch, as F2.7:0")
        microbatch, index = microbatch * slices + index, -1
    if index >= 0:
        raise ScheduleError(f"micro-batches of this schedule are not sliced; leave out the slice of {word!r}")
    return Action(_KINDS[letters], stage, unit, microbatch, *rest)


def describe(action: Action, slices: int = 1) -> str:
    """Return the action in plain English, for errors. slices: as in `write_action`."""
    names = ("stage", "unit", "micro-batch", "slice", "version", "slot", "group")
    fields = (f"{name} {value}" for name, value in zip(names, _fields(action, slices), strict=True) if value >= 0)
    return " ".join([Kind(action.kind).name, ", ".join(fields)]).strip()


def pairs_of(actions: Sequence[Action]) -> list[int]:
    """Return the index of the first action of each group that is a forward and a backward, in either order.

    actions: of one rank and section, in order.
    """
    pair_starts = []
    for group, members in groupby(range(len(actions)), key=lambda index: actions[index].group):
        rows = list(members)
        kinds = {actions[row].kind for row in rows}
        if group >= 0 and len(rows) == 2 and Kind.FORWARD in kinds and not kinds.isdisjoint(BACKWARDS):
            pair_starts.append(rows[0])
    return pair_starts


def on_side_stream(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of all actions on the second of two streams, chosen so that the halves of a pair
    never share a stream.

    All actions of a micro-batch on a stage have one stream. A forward takes the stream that the backward in its pair
    does not have: a backward comes after its own forward, so pairs never form a cycle.
    """
    side: dict[tuple[int, int], bool] = {}
    for first in pairs_of(actions):
        forward, backward = sorted(actions[first : first + 2], key=lambda action: action.kind != Kind.FORWARD)
        backward_on_side = side.get((backward.stage, backward.microbatch), False)
        side.setdefault((forward.stage, forward.microbatch), not backward_on_side)
    return frozenset(place for place, is_side in side.items() if is_side)
