"""Rows that lowering inserts around compute rows: gathers of weights, recomputation, copies to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from megapipe.schedules.actions import COMPUTE_KINDS, KIND, MICROBATCH, STAGE, VERSION, Ints, Kind, Mask, Rows, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import residences
from megapipe.schedules.memory import Offload, unit_places
from megapipe.schedules.schedule import Header
from megapipe.schedules.table import Table


class InsertionOrder(IntEnum):
    """Order of the rows around one compute row: those before it, then the row itself, then those after it."""

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
    """Rows to add, each at a place around an anchor row of the program; equal places keep the order given here.

    late: receives that are posted after the group of their anchor, right before what the anchor sends.
    """

    rows: Rows
    anchor: Ints
    place: InsertionOrder
    section: Ints
    late: Mask | None = None


def insert(table: Table, insertions: Sequence[Insertion]) -> tuple[Table, Ints]:
    """The program with the rows added, and each compute row's new index.

    Rows that are added around a row of a group go around the whole group, which is one action.
    """
    order = insertion_order(table, insertions)
    rows = np.concatenate([table.rows, *(i.rows for i in insertions)])[order]
    rank = np.concatenate([table.rank, *(table.rank[i.anchor] for i in insertions)])[order]
    section = np.concatenate([table.section, *(i.section for i in insertions)])[order]
    return replace(table, rows=rows, rank=rank, section=section), new_indices(order)


def insertion_order(table: Table, insertions: Sequence[Insertion]) -> Ints:
    """Return the rows of `insert` in their new order, numbered from those of the table on."""
    compute = np.arange(len(table.rows), dtype=np.int64)
    keys = [np.stack([compute * PLACES + InsertionOrder.COMPUTE, np.zeros_like(compute)])]
    keys += [_around(table, each) for each in insertions]
    places, turns = np.concatenate(keys, axis=1)
    return np.lexsort((turns, places))


def new_indices(order: Ints) -> Ints:
    """Return the new index of each row in an order."""
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.arange(len(order))
    return index


def _around(table: Table, insertion: Insertion) -> Ints:
    """Return the place of each added row in the program, and its turn at that place, shape [2, rows]."""
    anchor, place = insertion.anchor, insertion.place
    late = np.zeros(len(anchor), dtype=bool) if insertion.late is None else insertion.late
    after = late | (place > InsertionOrder.COMPUTE)
    row = np.where(after, table.action_last[anchor], table.action_first[anchor])
    sent = late | (place == InsertionOrder.SEND)
    turn = np.where(sent, 2 * anchor + ~late, 0)
    return np.stack([row * PLACES + np.where(late, InsertionOrder.SEND, place), turn])


def add_gathers(table: Table, added: Sequence[Insertion]) -> list[Insertion]:
    """Return a gather before each residence of a unit's weights and a release after it; ``table`` is cut into units.

    added: other insertions, among them the updates, which write the weights.
    """
    found = residences(table, _written(table, added))
    insertions = []
    for kind, use, anchor, place in (
        (Kind.GATHER_WEIGHTS, found.first_use, found.start, InsertionOrder.GATHER_WEIGHTS),
        (Kind.RELEASE_WEIGHTS, found.last_use, found.last_use, InsertionOrder.RELEASE_WEIGHTS),
    ):
        rows = rows_of(kind, table.stage[use], table.microbatch[use], unit=found.unit, version=table.version[use])
        insertions.append(Insertion(rows, anchor, place, table.section[anchor]))
    return insertions


def _written(table: Table, added: Sequence[Insertion]) -> Ints:
    """Return the first row after the updates that write a version, by stage and version; 0 for the first versions."""
    header = table.header
    written = np.zeros((table.num_stages, table.num_updates + header.num_versions), dtype=np.int64)
    for insertion in added:
        rows = insertion.rows[insertion.rows[:, KIND] == Kind.UPDATE]
        if len(rows):  # then all rows of this insertion are updates
            row = insertion.anchor + (insertion.place > InsertionOrder.COMPUTE)
            np.maximum.at(written, (rows[:, STAGE], rows[:, VERSION]), row)
    return written


Spans = Sequence[Sequence[range]]
"""Per stage, ranges of neighbouring units that are recomputed together, from the input of the first."""


def check_spans(header: Header, spans: Spans) -> None:
    """Raise ScheduleError unless each stage's spans are ascending, apart, and made of its units."""
    if len(spans) != len(header.stages):
        raise ScheduleError(f"recompute has spans for {len(spans)} stages, but there are {len(header.stages)}")
    for stage, (units, own) in enumerate(zip(header.units_per_stage, spans, strict=True)):
        free = 0
        for span in own:
            if span.step != 1 or not free <= span.start < span.stop <= units:
                raise ScheduleError(
                    f"recompute of stage {stage}: {span} must be one or more consecutive units from 0 to {units - 1}, "
                    "after the previous span"
                )
            free = span.stop


def add_recompute(table: Table, spans: Spans) -> Insertion:
    """Return the recomputed forwards of each span, ascending, before the backward of its last unit; ``table`` is cut
    into units."""
    most = max(table.header.units_per_stage)
    first = np.full((table.num_stages, most), -1, dtype=np.int64)
    for stage, own in enumerate(spans):
        for span in own:
            first[stage, span.stop - 1] = span.start
    backwards = table.rows_with(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    start = first[table.stage[backwards], table.unit[backwards]]
    backwards, start = backwards[start >= 0], start[start >= 0]
    length = table.unit[backwards] - start + 1
    anchor: Ints = np.repeat(backwards, length)
    within = np.arange(len(anchor)) - np.repeat(np.cumsum(length) - length, length)
    rows = rows_of(
        Kind.RECOMPUTE,
        table.rows[anchor, STAGE],
        table.rows[anchor, MICROBATCH],
        unit=np.repeat(start, length) + within,
        version=table.rows[anchor, VERSION],
    )
    return Insertion(rows, anchor, InsertionOrder.RECOMPUTE, table.section[anchor])


def add_offload(table: Table, offload: Offload) -> list[Insertion]:
    """Move the activations of chosen units out after their forward, and back ``prefetch`` compute actions before their
    backward; ``table`` is cut into units.

    If nothing would be computed meanwhile, they stay. Recomputed forwards do not count as compute actions here: a
    reload comes before them.
    """
    compute = table.rows_with(*COMPUTE_KINDS)
    section = (table.rank * table.num_sections + table.section)[compute]
    forward, backward = (_of_chosen(table, compute, offload, kinds) for kinds in (
        (Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT)))  # fmt: skip
    # Copies around a row of a group go around the whole group.
    starts, ends = (np.searchsorted(compute, each[compute]) for each in (table.action_first, table.action_last))
    ahead = starts[np.maximum(starts[backward] - offload.prefetch, np.searchsorted(section, section[backward]))]
    # Several sections may follow a section, and what leaves in one and comes back in the next must not depend on
    # which.
    last = np.searchsorted(section, section[forward], side="right") - 1
    leaves = np.where(section[forward] == section[backward], ahead >= ends[forward] + 2, ends[forward] < last)
    order = np.argsort(backward[leaves], kind="stable")
    out, back, ahead = compute[forward[leaves]], compute[backward[leaves][order]], ahead[leaves][order]
    anchor = np.where(ahead == 0, 0, compute[ahead - 1] + 1)
    return [
        _moving(table, Kind.OFFLOAD, out, out, InsertionOrder.OFFLOAD),
        _moving(table, Kind.RELOAD, back, anchor, InsertionOrder.RELOAD),
    ]


def _of_chosen(table: Table, compute: Ints, offload: Offload, kinds: tuple[Kind, ...]) -> Ints:
    """Places among the compute rows of the chosen units' rows of some kinds, by stage, micro-batch and unit."""
    chosen: Mask = np.zeros((table.num_stages, max(table.header.units_per_stage)), dtype=np.bool_)
    for stage, own in enumerate(offload.units):
        chosen[stage, list(own)] = True
    positions = np.flatnonzero(table.is_kind(*kinds)[compute] & chosen[table.stage[compute], table.unit[compute]])
    ordered: Ints = positions[np.argsort(unit_places(table)[compute[positions]])]
    return ordered


def _moving(table: Table, kind: Kind, rows: Ints, anchor: Ints, place: InsertionOrder) -> Insertion:
    moved = rows_of(kind, table.stage[rows], table.microbatch[rows], unit=table.unit[rows])
    return Insertion(moved, anchor, place, table.section[anchor])


def around_updates(insertion: Insertion) -> Insertion:
    """Return the same rows with copies of optimizer state around each update: the reload comes right after the start
    of the update before it, the offload after the update. Other rows stay as they are."""
    rows, anchor = insertion.rows, insertion.anchor
    if len(rows) == 0 or rows[0, KIND] != Kind.UPDATE:
        return insertion
    index = np.arange(len(rows))
    opens = np.append(True, (np.diff(anchor) != 0) | (np.diff(rows[:, MICROBATCH]) != 0))
    first = np.maximum.accumulate(np.where(opens, index, 0))
    reload, offload = rows.copy(), rows.copy()
    reload[:, KIND], offload[:, KIND] = Kind.RELOAD, Kind.OFFLOAD
    order = np.argsort(np.concatenate([3 * np.maximum(index - 1, first), 3 * index + 1, 3 * index + 2]), kind="stable")
    thrice = np.tile(index, 3)[order]
    return replace(
        insertion,
        rows=np.concatenate([reload, rows, offload])[order],
        anchor=anchor[thrice],
        section=insertion.section[thrice],
    )
