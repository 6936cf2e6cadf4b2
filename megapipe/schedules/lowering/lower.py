"""The chain of lowering passes, from a schedule of compute actions to one that an engine can run."""

from dataclasses import replace
from typing import Final

import numpy as np

from megapipe.schedules.actions import GROUP, UNIT, VERSION, Kind, Rows, repeats
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import check_states
from megapipe.schedules.lowering.communication import MessageTable, Posts, assign_slots, place_receives
from megapipe.schedules.lowering.insertion import (
    Spans,
    add_gathers,
    add_offload,
    add_recompute,
    add_reductions,
    around_updates,
    check_spans,
    insert,
)
from megapipe.schedules.memory import NOTHING, Offload
from megapipe.schedules.schedule import Schedule, Sections, shift_rows
from megapipe.schedules.table import Table
from megapipe.schedules.validation.rows import check_compute

STEADY_BODIES: Final = 3
"""Bodies that a never-flushing schedule is lowered over; the middle one is its steady state."""


def lower(
    schedule: Schedule,
    *,
    receive_ahead: int = 1,
    recompute: Spans = (),
    offload: Offload = NOTHING,
    checked: bool = False,
    updates: bool = True,
) -> Schedule:
    """Add to a schedule of compute actions everything else that a step does.

    ``receive_ahead``: at most this number of compute actions between a receive's posting and its use (at least 1: less
    can hang if sends wait for their receive), and never before the use of the link's previous message. With two
    gradient buffers updates wait until right before the first forward that reads the new version. If weights are
    gathered, every chunk is cut into units, whose weights are gathered before their use and released after it.
    ``recompute``: the spans that each stage recomputes before its backward; then, too, every chunk is cut into units.
    ``offload``: copies to host memory; for those of activations and weights, too, every chunk is cut into units.
    ``checked``: skip the check that the compute actions fit together. ``updates``: add reductions and optimizer steps;
    what ranks hold for their micro-batches does not depend on them.

    Raises ScheduleError if the compute actions do not fit together.
    """
    if receive_ahead < 1:
        raise ScheduleError(f"receive_ahead is {receive_ahead}; it must be at least 1, as receives precede their use")
    if schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} is already lowered; lower the compute actions it was made from")
    if not checked:
        check_compute(schedule)
    check_states(schedule)
    offload.check(schedule.header, recompute if schedule.header.mode == "train" else ())
    table = unrolled(schedule)
    training = schedule.header.mode == "train"
    recomputes = training and any(len(stage_spans) > 0 for stage_spans in recompute)
    if recomputes:
        check_spans(schedule.header, recompute)
    moves = training and offload.activations
    gathers = bool(schedule.header.gathered_weights.any())
    everywhere = recomputes or moves or gathers or (training and bool(schedule.header.sharded_gradients.any()))
    if everywhere or (training and schedule.header.reduced.any()):
        table = refine(table, everywhere=everywhere)
    messages = MessageTable.of(table)
    posts = place_receives(table, messages, receive_ahead)
    if recomputes:
        # This comes after the search for places of receives, because recomputed rows send and receive nothing.
        table, messages, posts = _with_recompute(table, messages, posts, recompute)
    insertions = [messages.sends(table), messages.receives(table, posts)]
    added = []
    if training and updates:
        added = add_reductions(table, lazy=schedule.header.gradient_buffers > 1, flushes=schedule.flushes)
    if gathers:
        insertions += add_gathers(table, added)
    insertions += [around_updates(each) for each in added] if offload.optimizer else added
    if moves:
        insertions += add_offload(table, offload)
    table, _ = insert(table, insertions)
    table = number_groups(assign_slots(table))
    header = replace(table.header, lowered=True)
    return Schedule(header, _sections(table), schedule.origin)


def _with_recompute(
    table: Table, messages: MessageTable, posts: Posts, spans: Spans
) -> tuple[Table, MessageTable, Posts]:
    """Return the table with the recomputed rows, and the rows of messages and of posted receives in the new table."""
    recomputed, action = add_recompute(table, spans), table.action_first
    table, index = insert(table, [recomputed])
    num_compute = len(index) - len(recomputed.rows)
    # A receive is also posted before the rows that are recomputed for its action.
    opens = index[:num_compute].copy()
    np.minimum.at(opens, action[recomputed.anchor], index[num_compute:])
    opens = opens[action]
    moved = replace(messages, producer=index[messages.producer], consumer=index[messages.consumer])
    return table, moved, posts._replace(row=np.where(posts.late, index[posts.row], opens[posts.row]))


def unrolled(schedule: Schedule) -> Table:
    """Return the compute actions of a schedule, each with the weight version of its micro-batch's update; one that
    never flushes is unrolled over `STEADY_BODIES`."""
    table = Table.unroll(schedule, 1 if schedule.flushes else schedule.prologue_steps + STEADY_BODIES)
    rows = table.rows.copy()
    rows[:, VERSION] = table.update
    return replace(table, rows=rows)


def _sections(table: Table) -> Sections:
    """Cut the table back into prologue, one steady body and epilogue, each counted from its own step."""
    bodies = 1 if table.flushes else STEADY_BODIES
    steady = (bodies + 1) // 2
    return Sections(_cut(table, 0, step=0), _cut(table, steady, step=steady - 1), _cut(table, bodies + 1, step=bodies))


def _cut(table: Table, section: int, *, step: int) -> tuple[Rows, ...]:
    header = table.header
    wanted = np.arange(header.num_ranks) * table.num_sections + section
    ends = (np.searchsorted(table.part, each) for each in (wanted, wanted + 1))
    bounds = zip(*ends, strict=True)
    microbatches, versions = step * header.num_microbatches, step * header.updates_per_step
    return tuple(shift_rows(table.rows[first:last], -microbatches, -versions) for first, last in bounds)


def refine(table: Table, *, everywhere: bool) -> Table:
    """Cut each stage's last micro-batch of every update into units: forward ascending, backward descending.

    ``everywhere``: all micro-batches.

    Forward and backward of one micro-batch keep one granularity, so that the engine cuts its graph between units. The
    rows of a group are cut together: their first units are a group, their second ones, and so on.
    """
    last = table.last_added[table.stage, table.update]
    cut = (last >= 0) & (table.microbatch == table.microbatch[last])
    cut |= everywhere

    copies = np.where(cut, table.units, 1)
    source, index = repeats(copies)
    order = np.lexsort((source, index, table.action_first[source]))
    source, index = source[order], index[order]
    rows = table.rows[source]
    ascending = table.is_kind(Kind.FORWARD)[source]
    rows[:, UNIT] = np.where(cut[source], np.where(ascending, index, copies[source] - 1 - index), -1)
    place = table.action_first[source] * (copies.max(initial=1) + 1) + index
    rows[:, GROUP] = np.where(table.group[source] >= 0, place, -1)
    return replace(table, rows=rows, rank=table.rank[source], section=table.section[source])


def number_groups(table: Table) -> Table:
    """Number the groups of each rank from 0 in every section; one row does not make a group."""
    if not (table.group >= 0).any():
        return table
    opens = (table.action_first < table.action_last) & (table.action_first == np.arange(len(table.rows)))
    counted = np.cumsum(opens)
    first = np.searchsorted(table.part, table.part)
    before = counted[first] - opens[first]
    rows = table.rows.copy()
    joined = table.action_first < table.action_last
    rows[:, GROUP] = np.where(joined, counted - before - 1, -1)
    return replace(table, rows=rows)
