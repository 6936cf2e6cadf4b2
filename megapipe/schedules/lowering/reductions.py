"""Adding reductions and updates: what ends an update's gradients and turns them into the next weights."""

import numpy as np

from megapipe.schedules.actions import UNIT, Ints, Kind, rows_of
from megapipe.schedules.lowering.insertion import Insertion, Place
from megapipe.schedules.lowering.program import Program, first_row_per, last_row_per


def add_reductions(program: Program, *, lazy: bool) -> list[Insertion]:
    """Counts at the start of a step, reductions behind the last backward that they include, scalars, updates."""
    return [
        _counts(program),
        *([_gradients(program)] if program.header.data_parallel else []),
        *([_tied(program)] if program.header.tied_groups else []),
        *([_scalars(program)] if program.header.updates_per_step == 1 else []),
        _updates(program, lazy=lazy),
    ]


def _last_microbatch(program: Program, update: Ints) -> Ints:
    return (update + 1) * program.header.microbatches_per_update - 1


def _counts(program: Program) -> Insertion:
    """One sum of loss-token counts a rank and step, ahead of the rank's first forward of that step."""
    header = program.header
    forwards = np.flatnonzero(program.is_kind(Kind.FORWARD))
    step = program.microbatch.astype(np.int64) // header.num_microbatches
    num_steps = int(step.max(initial=0)) + 1
    anchor = first_row_per((program.rank * num_steps + step)[forwards], forwards, header.num_ranks * num_steps)
    steps = np.tile(np.arange(num_steps), header.num_ranks)
    rows = rows_of(Kind.REDUCE_COUNTS, microbatch=(steps + 1) * header.num_microbatches - 1)
    return Insertion(rows, anchor, Place.REDUCE_COUNTS, program.section[anchor])


def _gradients(program: Program) -> Insertion:
    """One reduction right behind each refined backward: its unit's gradient is complete there."""
    anchor = np.flatnonzero(program.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT) & (program.rows[:, UNIT] >= 0))
    rows = rows_of(
        Kind.REDUCE_GRADIENTS,
        program.stage[anchor],
        _last_microbatch(program, program.update[anchor]),
        unit=program.rows[anchor, UNIT],
    )
    return Insertion(rows, anchor, Place.REDUCE_GRADIENTS, program.section[anchor])


def _last_gradient_rows(program: Program) -> Ints:
    """The last row that adds to each stage's gradient in each update, shape [stages, updates]."""
    num_updates = int(program.update.max(initial=0)) + 1
    num_stages = len(program.header.stages)
    adding = np.flatnonzero(program.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    keys = program.stage.astype(np.int64) * num_updates + program.update
    return last_row_per(keys[adding], adding, num_stages * num_updates).reshape(num_stages, num_updates)


def _tied(program: Program) -> Insertion:
    """One reduction a tied group and rank behind the last backward of every use there.

    On each rank the groups of an update follow in ascending order, so that no two ranks can start them crosswise.
    """
    header = program.header
    last = _last_gradient_rows(program)
    updates = np.arange(last.shape[1])
    latest = np.full((header.num_ranks, last.shape[1]), -1, dtype=np.int64)
    rows, anchors = [], []
    for group, uses in enumerate(header.tied_groups):
        for owner in header.tied_owners(group):
            rank = header.stages[owner].rank
            local = [stage for stage in uses if header.stages[stage].rank == rank]
            latest[rank] = np.maximum(latest[rank], last[local].max(axis=0))
            unit = header.units_per_stage[owner] + group
            rows.append(rows_of(Kind.REDUCE_TIED, owner, _last_microbatch(program, updates), unit=unit))
            anchors.append(latest[rank].copy())
    anchor = np.concatenate(anchors)
    return Insertion(np.concatenate(rows), anchor, Place.REDUCE_TIED, program.section[anchor])


def _last_rows_by_rank(program: Program, last: Ints) -> Ints:
    """From the last rows per stage to the last rows per rank, shape [ranks, updates]."""
    by_rank = np.full((program.header.num_ranks, last.shape[1]), -1, dtype=np.int64)
    np.maximum.at(by_rank, program.header.stage_ranks, last)
    return by_rank


def _scalars(program: Program) -> Insertion:
    """One sum of norms and flags a rank and update, behind the rank's last gradient of it."""
    by_rank = _last_rows_by_rank(program, _last_gradient_rows(program))
    anchor = by_rank.ravel()
    updates = np.tile(np.arange(by_rank.shape[1]), len(by_rank))
    rows = rows_of(Kind.REDUCE_SCALARS, microbatch=_last_microbatch(program, updates))
    return Insertion(rows, anchor, Place.REDUCE_SCALARS, program.section[anchor])


def _updates(program: Program, *, lazy: bool) -> Insertion:
    """One optimizer step a state unit and update.

    Eager updates follow the rank's last gradient of the update. Lazy ones wait until the section that the next
    forward on the new version would begin: update t stands at the end of body t, and the last at the very end.
    """
    header = program.header
    last = _last_gradient_rows(program)
    by_rank = _last_rows_by_rank(program, last)
    updates = np.arange(last.shape[1])
    rows, anchors, sections = [], [], []
    for stage, place in enumerate(header.stages):
        anchor = by_rank[place.rank]
        section = program.section[anchor]
        if lazy:
            section = updates + 1
            mine = np.flatnonzero(program.rank == place.rank)
            anchor = mine[np.searchsorted(program.section[mine], section, side="right") - 1]
        for unit in header.state_units(stage):
            version = updates + header.versions_per_stage[stage]
            rows.append(rows_of(Kind.UPDATE, stage, _last_microbatch(program, updates), unit=unit, version=version))
            anchors.append(anchor)
            sections.append(section)
    order = np.argsort(np.concatenate(anchors), kind="stable")
    return Insertion(
        np.concatenate(rows)[order], np.concatenate(anchors)[order], Place.UPDATE, np.concatenate(sections)[order]
    )
