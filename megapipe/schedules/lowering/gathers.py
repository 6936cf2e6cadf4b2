"""Adding gathers and releases of sharded weights."""

from collections.abc import Sequence

import numpy as np

from megapipe.schedules.actions import KIND, STAGE, VERSION, Ints, Kind, rows_of
from megapipe.schedules.gathers import residences
from megapipe.schedules.lowering.insertion import Insertion, InsertionOrder
from megapipe.schedules.table import Table


def add_gathers(table: Table, added: Sequence[Insertion]) -> list[Insertion]:
    """A gather ahead of each residence of a unit's weights, a release behind it; ``table`` is cut into units.

    added: among what else is to be inserted, the updates, which write the weights.
    """
    found = residences(table, _written(table, added))
    insertions = []
    for kind, use, anchor, place in (
        (Kind.GATHER_WEIGHTS, found.first_use, found.start, InsertionOrder.GATHER_WEIGHTS),
        (Kind.RELEASE_WEIGHTS, found.last_use, found.last_use, InsertionOrder.RELEASE_WEIGHTS),
    ):
        rows = rows_of(
            kind, table.stage[use], table.microbatch[use], unit=table.unit[use], version=table.version[use]
        )  # fmt: skip
        insertions.append(Insertion(rows, anchor, place, table.section[anchor]))
    return insertions


def _written(table: Table, added: Sequence[Insertion]) -> Ints:
    """The first row behind the updates that write a version, by stage and version; 0 for those of the start."""
    header = table.header
    written = np.zeros((table.num_stages, table.num_updates + header.num_versions), dtype=np.int64)
    for insertion in added:
        rows = insertion.rows[insertion.rows[:, KIND] == Kind.UPDATE]
        if len(rows):  # then all of them are
            row = insertion.anchor + (insertion.place > InsertionOrder.COMPUTE)
            np.maximum.at(written, (rows[:, STAGE], rows[:, VERSION]), row)
    return written
