"""Adding reductions and updates: what ends an update's gradients and turns them into the next weights."""

import numpy as np

from megapipe.schedules.actions import COLUMNS, MICROBATCH, STAGE, UNIT, Ints, Kind, Rows, rows_of
from megapipe.schedules.gathers import ADDING, last_additions, num_places, of_states
from megapipe.schedules.lowering.insertion import Insertion, InsertionOrder
from megapipe.schedules.table import Table, first_row_per, last_row_per


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
    header = table.header
    forwards = table.rows_with(Kind.FORWARD)
    key = table.rank[forwards] * table.steps + table.microbatch[forwards] // header.num_microbatches
    anchor = first_row_per(key, forwards, header.num_ranks * table.steps)
    steps = np.tile(np.arange(table.steps), header.num_ranks)
    rows = rows_of(Kind.REDUCE_COUNTS, microbatch=(steps + 1) * header.num_microbatches - 1)
    return Insertion(rows, anchor, InsertionOrder.REDUCE_COUNTS, table.section[anchor])


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
        first, *others = (by_rank[rank] for rank in sorted(by_rank))
        turns = {summed[index]: index for index in first}
        for own in others:
            turn[own] = [turns[summed[index]] for index in own]
            in_turn = np.array(own)[np.argsort(turn[own])]
            anchor[in_turn] = np.maximum.accumulate(anchor[in_turn])
    order = np.lexsort((turn, anchor))
    return rows[order], anchor[order]


def _last_gradient_rows(table: Table) -> Ints:
    """The last row that adds to each stage's gradient in each update, shape [stages, updates]."""
    adding = table.rows_with(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    keys = table.stage[adding] * table.num_updates + table.update[adding]
    shape = table.num_stages, table.num_updates
    return last_row_per(keys, adding, shape[0] * shape[1]).reshape(shape)


def _tied(table: Table) -> Insertion:
    """Return one reduction per tied group and rank, after the last backward of every use there.

    On each rank the groups of an update follow in ascending order, so that no two ranks can start them crosswise. A
    second group of the same ranks follows all gradients: its sum waits for the first one's, and on a GPU with one
    hardware queue everything launched after it would wait, too.
    """
    header = table.header
    last = _last_gradient_rows(table)
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


def _last_rows_by_rank(table: Table, last: Ints) -> Ints:
    """From the last rows per stage to the last rows per rank, shape [ranks, updates]."""
    by_rank = np.full((table.header.num_ranks, last.shape[1]), -1, dtype=np.int64)
    np.maximum.at(by_rank, table.header.stage_ranks, last)
    return by_rank


def _scalars(table: Table) -> Insertion:
    """Return one sum of losses, norms and flags per rank and step, after the rank's last gradient of the step."""
    every = table.header.updates_per_step
    by_rank = _last_rows_by_rank(table, _last_gradient_rows(table))[:, every - 1 :: every]
    anchor = by_rank.ravel()
    steps = np.tile(np.arange(by_rank.shape[1]), len(by_rank))
    rows = rows_of(Kind.REDUCE_SCALARS, microbatch=(steps + 1) * table.header.num_microbatches - 1)
    return Insertion(rows, anchor, InsertionOrder.REDUCE_SCALARS, table.section[anchor])


def _updates(table: Table, *, lazy: bool, flushes: bool) -> list[Insertion]:
    """Return one optimizer step per state unit and update.

    Eager updates follow the rank's last gradient of the update; where that ends a section, they follow the first
    receives of the next one, so that a rank that waits in an update can still receive. Lazy ones wait for the end of
    the section after which the new version is read: update t is at the end of body t, the last one at the end.
    """
    by_rank = _last_rows_by_rank(table, _last_gradient_rows(table))
    section_key = table.rank * table.num_sections + table.section
    updates = np.arange(by_rank.shape[1])
    parts = []
    for rank in range(table.header.num_ranks):
        anchor, section = by_rank[rank], table.section[by_rank[rank]]
        ahead = np.zeros(len(anchor), dtype=np.bool_)
        if lazy:
            section = updates + 1
            anchor = np.searchsorted(section_key, rank * table.num_sections + section, side="right") - 1
        elif not flushes:
            opens = np.searchsorted(section_key, rank * table.num_sections + section + 1)
            section = section + ((opens == anchor + 1) & (section + 1 < table.num_sections))
            ahead = (np.append(section_key, -1)[opens] == rank * table.num_sections + section) & (opens == anchor + 1)
            anchor = np.where(ahead, opens, anchor)
        parts.append((_update_rows(table, rank, updates), anchor, section, ahead))
    rows = np.concatenate([part[0].reshape(-1, len(COLUMNS)) for part in parts])
    anchor, section, ahead = (
        np.concatenate([np.repeat(part[column], part[0].shape[1]) for part in parts]) for column in (1, 2, 3)
    )
    return [
        Insertion(rows[mine], anchor[mine], place, section[mine])
        for mine, place in ((ahead, InsertionOrder.UPDATE_AHEAD), (~ahead, InsertionOrder.UPDATE))
    ]


def _update_rows(table: Table, rank: int, updates: Ints) -> Rows:
    """The rank's optimizer steps, every state unit of its stages in turn; shape [updates, states, columns]."""
    header = table.header
    states = [(stage, unit) for stage in header.stages_on(rank) for unit in header.state_units(stage)]
    stage, unit = np.array(states, dtype=np.int64).T
    update = updates[:, None]
    version = update + np.array(header.versions_per_stage)[stage]
    return rows_of(Kind.UPDATE, stage, _last_microbatch(table, update), unit=unit, version=version)
