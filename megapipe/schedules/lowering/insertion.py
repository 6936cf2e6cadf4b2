"""Where lowering puts the rows that it adds around the compute rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from megapipe.schedules.actions import Ints, Rows
from megapipe.schedules.table import Table


class InsertionOrder(IntEnum):
    """Order of what stands around one compute row: before it, then the row itself, then after it."""

    REDUCE_COUNTS = 0
    RECEIVE = 1
    UPDATE_AHEAD = 2
    GATHER_WEIGHTS = 3
    RELOAD = 4
    RECOMPUTE = 5
    COMPUTE = 6
    SEND = 7
    OFFLOAD = 8
    RELEASE_WEIGHTS = 9
    REDUCE_GRADIENTS = 10
    REDUCE_TIED = 11
    REDUCE_SCALARS = 12
    UPDATE = 13


PLACES: Final = len(InsertionOrder)


@dataclass(frozen=True)
class Insertion:
    """Rows to add, each at a place around an anchor row of the program; equal places keep the order given here."""

    rows: Rows
    anchor: Ints
    place: InsertionOrder
    section: Ints


def insert(table: Table, insertions: Sequence[Insertion]) -> tuple[Table, Ints]:
    """The program with the rows added, and each compute row's new index."""
    compute = np.arange(len(table.rows), dtype=np.int64)
    keys = np.concatenate(
        [compute * PLACES + InsertionOrder.COMPUTE, *(i.anchor * PLACES + i.place for i in insertions)]
    )
    order = np.argsort(keys, kind="stable")
    rows = np.concatenate([table.rows, *(i.rows for i in insertions)])[order]
    rank = np.concatenate([table.rank, *(table.rank[i.anchor] for i in insertions)])[order]
    section = np.concatenate([table.section, *(i.section for i in insertions)])[order]
    new_index = np.empty(len(order), dtype=np.int64)
    new_index[order] = np.arange(len(order))
    return replace(table, rows=rows, rank=rank, section=section), new_index
