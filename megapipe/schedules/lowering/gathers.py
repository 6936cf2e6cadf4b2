"""Adding gathers and releases of sharded weights."""

from megapipe.schedules.actions import Kind, rows_of
from megapipe.schedules.gathers import residences
from megapipe.schedules.lowering.insertion import Insertion, Place
from megapipe.schedules.table import Table


def add_gathers(table: Table) -> list[Insertion]:
    """A gather ahead of each residence of a unit's weights, a release behind it; ``table`` is cut into units."""
    found = residences(table)
    insertions = []
    for kind, use, anchor, place in (
        (Kind.GATHER_WEIGHTS, found.first_use, found.start, Place.GATHER_WEIGHTS),
        (Kind.RELEASE_WEIGHTS, found.last_use, found.last_use, Place.RELEASE_WEIGHTS),
    ):
        rows = rows_of(
            kind, table.stage[use], table.microbatch[use], unit=table.unit[use], version=table.version[use]
        )  # fmt: skip
        insertions.append(Insertion(rows, anchor, place, table.section[anchor]))
    return insertions
