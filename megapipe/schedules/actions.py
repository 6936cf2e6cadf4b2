"""The words of the schedule language: action kinds, the columns they are stored in, and the view of one row.

A schedule is a table of int32 rows, one row an action, -1 where a column does not apply:

* ``kind``: a :class:`Kind`.
* ``stage``: the stage on this rank that the action belongs to.
* ``unit``: index of a unit within the stage; -1 is the whole chunk (or not applicable).
* ``microbatch``: the micro-batch, counted from the body's step. Reductions and updates name the last one they include.
* ``slice``: index of a sequence slice of the micro-batch.
* ``version``: weight version that a compute action reads, or that ``UPDATE`` produces, counted from the body's step.
* ``slot``: the stage's receive buffer that a receive fills or a compute action reads.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
"""Actions of one rank, shape [actions, len(COLUMNS)]."""
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

COLUMNS: Final = ("kind", "stage", "unit", "microbatch", "slice", "version", "slot")
KIND, STAGE, UNIT, MICROBATCH, SLICE, VERSION, SLOT = range(len(COLUMNS))


class Kind(IntEnum):
    """What an action does. Communication kinds mark the start; whichever action needs the result awaits it."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECOMPUTE = 4
    SEND_ACTIVATION = 5
    RECV_ACTIVATION = 6
    SEND_GRADIENT = 7
    RECV_GRADIENT = 8
    GATHER_WEIGHTS = 9
    RELEASE_WEIGHTS = 10
    REDUCE_GRADIENTS = 11
    REDUCE_TIED = 12
    REDUCE_COUNTS = 13
    REDUCE_SCALARS = 14
    OFFLOAD = 15
    RELOAD = 16
    UPDATE = 17


COMPUTE_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""What a generator may write; lowering adds the rest."""

COMPUTE_STREAM: Final = (*COMPUTE_KINDS, Kind.RECOMPUTE)
"""What computes with a model's layers."""


class Action(NamedTuple):
    """View of one row of a schedule; the fields are the columns, in their order."""

    kind: Kind
    stage: int = -1
    unit: int = -1
    microbatch: int = -1
    slice: int = -1
    version: int = -1
    slot: int = -1


def rows_of(
    kind: int | Ints | Rows,
    stage: int | Ints | Rows = -1,
    microbatch: int | Ints | Rows = -1,
    *,
    unit: int | Ints | Rows = -1,
    version: int | Ints | Rows = -1,
    slot: int | Ints | Rows = -1,
) -> Rows:
    """Rows from columns; numbers and arrays broadcast against each other. Shape [..., len(COLUMNS)]."""
    columns = (kind, stage, unit, microbatch, -1, version, slot)
    rows = np.empty((*np.broadcast_shapes((1,), *map(np.shape, columns)), len(COLUMNS)), dtype=np.int32)
    for number, column in enumerate(columns):
        rows[..., number] = column
    return rows


def empty_rows() -> Rows:
    """No actions: shape [0, len(COLUMNS)]."""
    return np.empty((0, len(COLUMNS)), dtype=np.int32)


def kind_mask(kinds: Rows, *wanted: Kind) -> Mask:
    """Which entries of a kind column are one of ``wanted``."""
    table = np.zeros(len(Kind), dtype=np.bool_)
    table[list(wanted)] = True
    return table[kinds]
