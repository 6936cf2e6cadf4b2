"""Rows that lowering inserts around compute rows, other than messages.

These are gathers of weights, recomputation, copies to host memory, reductions, and updates. Reductions end the
gradients of an update, and updates turn them into the next weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from megapipe.schedules.actions import (
    ADDING,
    BACKWARDS,
    COLUMNS,
    COMPUTE_KINDS,
    KIND,
    MICROBATCH,
    STAGE,
    UNIT,
    VERSION,
    Ints,
    Kind,
    Mask,
    Rows,
    repeats,
    rows_of,
)
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import last_additions, num_places, of_states, residences
from megapipe.schedules.memory import Offload, unit_places
from megapipe.schedules.schedule import Header
from megapipe.schedules.table import Table, last_row_per


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
"""Number of places around a row."""


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
    """Return the program with the rows added, and each compute row's new index.

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
    residence = residences(table, _written(table, added))
    insertions = []
    for kind, use, anchor, place in (
        (Kind.GATHER_WEIGHTS, residence.first_use, residence.start, InsertionOrder.GATHER_WEIGHTS),
        (Kind.RELEASE_WEIGHTS, residence.last_use, residence.last_use, InsertionOrder.RELEASE_WEIGHTS),
    ):
        rows = rows_of(kind, table.stage[use], table.microbatch[use], unit=residence.unit, version=table.version[use])
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
    for stage, (units, stage_spans) in enumerate(zip(header.units_per_stage, spans, strict=True)):
        free = 0
        for span in stage_spans:
            if span.step != 1 or not free <= span.start < span.stop <= units:
                raise ScheduleError(
                    f"recompute of stage {stage}: {span} must be one or more "
                    f"consecutive units from 0 to {units - 1}, after the previous span"
                )
            free = span.stop


def add_recompute(table: Table, spans: Spans) -> Insertion:
    """Return the recomputed forwards of each span, ascending, before the backward of its last unit; ``table`` is cut
    into units."""
    most = max(table.header.units_per_stage)
    first = np.full((table.num_stages, most), -1, dtype=np.int64)
    for stage, stage_spans in enumerate(spans):
        for span in stage_spans:
            first[stage, span.stop - 1] = span.start
    backwards = table.rows_with(*BACKWARDS)
    start = first[table.stage[backwards], table.unit[backwards]]
    backwards, start = backwards[start >= 0], start[start >= 0]
    source, within = repeats(table.unit[backwards] - start + 1)
    anchor: Ints = backwards[source]
    unit, version = start[source] + within, table.version[anchor]
    rows = rows_of(Kind.RECOMPUTE, table.stage[anchor], table.microbatch[anchor], unit=unit, version=version)
    return Insertion(rows, anchor, InsertionOrder.RECOMPUTE, table.section[anchor])


def add_offload(table: Table, offload: Offload) -> list[Insertion]:
    """Move the activations of chosen units out after their forward, and back ``prefetch`` compute actions before their
    backward; ``table`` is cut into units.

    If nothing would be computed meanwhile, they stay. Recomputed forwards do not count as compute actions here: a
    reload comes before them.
    """
    compute = table.rows_with(*COMPUTE_KINDS)
    section = table.part[compute]
    forward, backward = (_of_chosen(table, compute, offload, kinds) for kinds in ((Kind.FORWARD,), BACKWARDS))
    # Copies around a row of a group go around the whole group.
    starts, ends = (np.searchsorted(compute, each[compute]) for each in (table.action_first, table.action_last))
    reload_place = starts[np.maximum(starts[backward] - offload.prefetch, np.searchsorted(section, section[backward]))]
    # Several sections may follow a section, and what leaves in one and comes back in the next must not depend on
    # which.
    last = np.searchsorted(section, section[forward], side="right") - 1
    leaves = np.where(section[forward] == section[backward], reload_place >= ends[forward] + 2, ends[forward] < last)
    order = np.argsort(backward[leaves], kind="stable")
    out, back, reload_place = compute[forward[leaves]], compute[backward[leaves][order]], reload_place[leaves][order]
    anchor = np.where(reload_place == 0, 0, compute[reload_place - 1] + 1)
    return [
        _moving(table, Kind.OFFLOAD, out, out, InsertionOrder.OFFLOAD),
        _moving(table, Kind.RELOAD, back, anchor, InsertionOrder.RELOAD),
    ]


def _of_chosen(table: Table, compute: Ints, offload: Offload, kinds: tuple[Kind, ...]) -> Ints:
    """Return the places, among the compute rows, of the chosen units' rows of some kinds, by stage, micro-batch and
    unit."""
    chosen: Mask = np.zeros((table.num_stages, max(table.header.units_per_stage)), dtype=np.bool_)
    for stage, stage_units in enumerate(offload.units):
        chosen[stage, list(stage_units)] = True
    positions = np.flatnonzero(table.is_kind(*kinds)[compute] & chosen[table.stage[compute], table.unit[compute]])
    return positions[np.argsort(unit_places(table)[compute[positions]])]


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


def add_reductions(table: Table, *, lazy: bool, flushes: bool) -> list[Insertion]:
    """Return counts at the start of a step, reductions after the last backward that they include, scalars, updates."""
    return [
        _counts(table),
        *([_gradients(table)] if table.header.reduced.any() else []),
        *([_tied(table)] if table.header.tied_groups else []),
        _scalars(table),
        *_updates(table, lazy=lazy, flushes=flushes),
    ]


def _last_microbatch(table: Table, update: Ints) -> Ints:
    return (update + 1) * table.header.microbatches_per_update - 1


def _counts(table: Table) -> Insertion:
    """Return one sum of loss-token counts per rank and step, before the rank's first forward of that step."""
    anchor = table.first_by_step(table.rows_with(Kind.FORWARD))
    return _each_step(table, Kind.REDUCE_COUNTS, anchor.ravel(), InsertionOrder.REDUCE_COUNTS)


def _each_step(table: Table, kind: Kind, anchor: Ints, place: InsertionOrder) -> Insertion:
    """Return a row of a kind for each rank and step."""
    steps = np.tile(np.arange(table.steps), table.header.num_ranks)
    rows = rows_of(kind, microbatch=(steps + 1) * table.header.num_microbatches - 1)
    return Insertion(rows, anchor, place, table.section[anchor])


def _gradients(table: Table) -> Insertion:
    """Return one reduction per unit and update, right after the backward that completes the unit's gradient.

    Sharded gradients have one for each stay in the pool, which names the micro-batch whose backward comes before it.
    """
    header, adding = table.header, table.rows_with(*ADDING)
    whole = of_states(table, adding[table.unit[adding] >= 0], ~header.sharded_gradients & header.reduced[:, None])
    last = last_row_per(whole.places(table), np.arange(len(whole.row)), num_places(table))
    complete, sharded = whole.where(last[last >= 0]), last_additions(table)
    anchor, unit = np.concatenate([complete.row, sharded.row]), np.concatenate([complete.unit, sharded.unit])
    microbatch = np.concatenate([_last_microbatch(table, table.update[complete.row]), table.microbatch[sharded.row]])
    order = np.lexsort((unit, anchor))
    anchor, microbatch = anchor[order], microbatch[order]
    rows = rows_of(Kind.REDUCE_GRADIENTS, table.stage[anchor], microbatch, unit=unit[order])
    if header.shared.any():
        rows, anchor = _in_one_order(table, rows, anchor)
    return Insertion(rows, anchor, InsertionOrder.REDUCE_GRADIENTS, table.section[anchor])


def _in_one_order(table: Table, rows: Rows, anchor: Ints) -> tuple[Rows, Ints]:
    """Return reductions, with later anchors if a rank would otherwise start those of shared parts in another order
    than the first rank that takes part. rows: in the order of their anchors."""
    header, turn = table.header, np.arange(len(rows))
    by_ranks: dict[frozenset[int], dict[int, list[int]]] = {}
    summed: dict[int, tuple[int, int, int]] = {}
    for index in np.flatnonzero(header.shared[rows[:, STAGE]]).tolist():
        stage, unit, microbatch = rows[index, [STAGE, UNIT, MICROBATCH]].tolist()
        summed[index] = header.holders[stage][0], unit, microbatch
        by_rank = by_ranks.setdefault(header.summing_ranks(stage, unit), {})
        by_rank.setdefault(int(header.stage_ranks[stage]), []).append(index)
    for by_rank in by_ranks.values():
        first, *other_ranks = (by_rank[rank] for rank in sorted(by_rank))
        turns = {summed[index]: index for index in first}
        for indices in other_ranks:
            turn[indices] = [turns[summed[index]] for index in indices]
            in_turn = np.array(indices)[np.argsort(turn[indices])]
            anchor[in_turn] = np.maximum.accumulate(anchor[in_turn])
    order = np.lexsort((turn, anchor))
    return rows[order], anchor[order]


def _tied(table: Table) -> Insertion:
    """Return one reduction per tied group and rank, after the last backward of every use there.

    On each rank the groups of an update follow in ascending order, so that no two ranks can start them crosswise. A
    second group of the same ranks follows all gradients: its sum waits for the first one's, and on a GPU with one
    hardware queue everything launched after it would wait, too.
    """
    header = table.header
    last = table.last_added
    updates = np.arange(last.shape[1])
    latest = np.full((header.num_ranks, last.shape[1]), -1, dtype=np.int64)
    rows, anchors = [], []
    seen: set[frozenset[int]] = set()
    for group, uses in enumerate(header.tied_groups):
        ranks = frozenset(header.stages[stage].rank for stage in uses)
        second = ranks in seen
        seen.add(ranks)
        for owner in header.tied_owners(group):
            rank = header.stages[owner].rank
            local = header.stages_on(rank) if second else [s for s in uses if header.stages[s].rank == rank]
            latest[rank] = np.maximum(latest[rank], last[list(local)].max(axis=0))
            unit = header.tied_unit(owner, group)
            rows.append(rows_of(Kind.REDUCE_TIED, owner, _last_microbatch(table, updates), unit=unit))
            anchors.append(latest[rank].copy())
    anchor = np.concatenate(anchors)
    return Insertion(np.concatenate(rows), anchor, InsertionOrder.REDUCE_TIED, table.section[anchor])


def _last_by_rank(table: Table) -> Ints:
    """Return the last row that adds to a gradient on each rank in each update, shape [ranks, updates]."""
    by_rank = np.full((table.header.num_ranks, table.num_updates), -1, dtype=np.int64)
    np.maximum.at(by_rank, table.header.stage_ranks, table.last_added)
    return by_rank


def _scalars(table: Table) -> Insertion:
    """Return one sum of losses, norms and flags per rank and step, after the rank's last gradient of the step."""
    every = table.header.updates_per_step
    anchor = _last_by_rank(table)[:, every - 1 :: every].ravel()
    return _each_step(table, Kind.REDUCE_SCALARS, anchor, InsertionOrder.REDUCE_SCALARS)


def _updates(table: Table, *, lazy: bool, flushes: bool) -> list[Insertion]:
    """Return one optimizer step per state unit and update.

    Eager updates follow the rank's last gradient of the update; where that ends a section, they follow the first
    receives of the next one, so that a rank that waits in an update can still receive. Lazy ones wait for the end of
    the section after which the new version is read: update t is at the end of body t, the last one at the end.
    """
    section_key, ranks = table.part, range(table.header.num_ranks)
    anchor, updates, prologue = _last_by_rank(table), np.arange(table.num_updates), table.num_sections * np.c_[ranks]
    section, in_next_section = table.section[anchor], np.zeros_like(anchor, dtype=np.bool_)
    if lazy:
        section = np.broadcast_to(updates + 1, anchor.shape)
        anchor = np.searchsorted(section_key, prologue + section, side="right") - 1
    elif not flushes:
        opens = np.searchsorted(section_key, prologue + section + 1)
        ends_section = opens == anchor + 1
        section = section + (ends_section & (section + 1 < table.num_sections))
        in_next_section = ends_section & (np.append(section_key, -1)[opens] == prologue + section)
        anchor = np.where(in_next_section, opens, anchor)
    by_rank = [_update_rows(table, rank, updates) for rank in ranks]
    rows = np.concatenate([each.reshape(-1, len(COLUMNS)) for each in by_rank])
    num_states = np.repeat([each.shape[1] for each in by_rank], len(updates))
    anchor, section = anchor.ravel().repeat(num_states), section.ravel().repeat(num_states)
    in_next_section = in_next_section.ravel().repeat(num_states)
    return [
        Insertion(rows[mine], anchor[mine], place, section[mine])
        for mine, place in ((in_next_section, InsertionOrder.UPDATE_AHEAD), (~in_next_section, InsertionOrder.UPDATE))
    ]


def _update_rows(table: Table, rank: int, updates: Ints) -> Rows:
    """Return the rank's optimizer steps, every state unit of its stages in turn; shape [updates, states, columns]."""
    stage, unit = table.header.states_on(rank)
    update = updates[:, None]
    version = update + np.array(table.header.versions_per_stage)[stage]
    return rows_of(Kind.UPDATE, stage, _last_microbatch(table, update), unit=unit, version=version)
