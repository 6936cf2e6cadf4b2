"""Gathers and releases of sharded weights, and reductions of sharded gradients, within the pools of a rank (ZeRO-3).

Weights in host memory follow the same rule: their gather is a copy to the device.

A *run* is a sequence of neighbouring compute actions of a rank that use the same layer, or a group. During a run, the
rank holds or gathers the state units of the layers that are used from there on, in their order, until the weight
pool is full. If the pool has room for one unit, there is no prefetch; with room for two, the rank gathers one unit
ahead. No unit is dropped while it is among them, so no order of gathers with the same pool gathers less. Weight halves
of split backwards work on saved inputs and output gradients and use no weights.

A schedule that never flushes keeps several versions of a unit's weights, and gradients of several updates. Each is
held like a unit of its own. No version is gathered before the update that writes it, and none is kept from one section
to the next, because the section that follows depends on whether the run continues.
"""

from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megapipe.schedules.actions import ADDING, BACKWARDS, Ints, Kind, Mask, repeats
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table

USES = (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARDS)
"""Kinds that compute with a layer's weights."""
GATHERS = (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS)
STATE_KINDS = (*GATHERS, Kind.REDUCE_GRADIENTS)
"""Kinds that name a state unit of a stage; compute actions name a layer."""


class StateRows(NamedTuple):
    """Rows of a table, each once for every state unit that it is about; ``unit`` is the id within the row's stage."""

    row: Ints
    unit: Ints

    def where(self, chosen: Mask | Ints) -> "StateRows":
        """Return the chosen entries, by a mask or by their indices."""
        return StateRows(self.row[chosen], self.unit[chosen])

    def places(self, table: Table) -> Ints:
        """Return one number for the stage, update (and so weight version) and state unit of each entry."""
        return table.stage_update[self.row] * table.header.most_states + self.unit


@dataclass(frozen=True)
class Residence:
    """One entry per gather: rows of its first and last use, its state unit, and the row before which it starts."""

    first_use: Ints
    last_use: Ints
    unit: Ints
    start: Ints


def check_states(schedule: Schedule) -> None:
    """Raise ScheduleError if a schedule cannot run on sharded weights or gradients, or on weights in host memory."""
    header = schedule.header
    header.states.checked(header.name, header.units_per_stage)
    alone = header.mode == "train" and not header.data_parallel
    if alone and (header.gathered_weights & ~header.host_weights).any():
        raise ScheduleError(
            f"{header.name} shards weights without data parallelism: there is "
            "no rank to gather from; set data_parallel, or keep weights whole"
        )
    sharded = header.sharded_gradients | (header.gathered_weights & ~header.host_weights)
    if header.shared.any() and sharded[header.shared].any():
        stage = int(np.argmax(header.shared & sharded.any(axis=1)))
        raise ScheduleError(
            f"{header.name} shards weights or gradients of stage {stage}, but stages "
            f"{', '.join(map(str, header.holders[stage]))} hold the same part of the model, and only whole gradients "
            "are summed over them; keep weights and gradients whole (ZeRO stage 1)"
        )
    if alone and header.sharded_gradients.any():
        raise ScheduleError(
            f"{header.name} shards gradients without data parallelism: there is "
            "no rank to shard them with; set data_parallel, or keep gradients whole"
        )
    if header.host_weights.any() and not schedule.flushes:
        raise ScheduleError(
            f"{header.name} never flushes and keeps several weight versions on the "
            "device; use a schedule that flushes, or keep no weights in host memory"
        )


def of_states(table: Table, rows: Ints, chosen: Mask) -> StateRows:
    """Return rows, which are cut into units, each with the state units that it is about.

    chosen: which state units count, shape [stages, most_states], such as `Header.sharded_gradients`.
    """
    header, stage, unit = table.header, table.stage[rows], table.unit[rows]
    names_state = table.is_kind(*STATE_KINDS)[rows]
    first = np.where(names_state, unit, header.first_states[stage, unit])
    count = np.where(names_state, 1, header.first_states[stage, unit + 1] - first)
    source, index = repeats(count)
    states = first[source] + index
    entries = StateRows(rows[source], states)
    return entries.where(chosen[stage[source], states])


def by_place(table: Table, rows: Ints, chosen: Mask) -> tuple[StateRows, Ints]:
    """Return `of_states` by place, then by row, and the place of each entry."""
    every = of_states(table, rows, chosen)
    place = every.places(table)
    order = np.lexsort((every.row, place))
    return every.where(order), place[order]


def num_places(table: Table) -> int:
    """Return the number of places that `StateRows.places` can give."""
    return table.num_stages * table.num_updates * table.header.most_states


class Runs(NamedTuple):
    """Runs of compute rows that use the same layer, or of a group, and every use of a state unit by one of them.

    run_start, part: of each run, its first row and the part of the rows that it is in. run, place, size: of each use,
    its run, and the unit's place and size. first, last: the first and last row that uses the unit; in a group, not
    every row uses every unit.
    """

    run_start: Ints
    part: Ints
    run: Ints
    place: Ints
    size: Ints
    first: Ints
    last: Ints

    def reverse(self) -> "Runs":
        """Return the runs from last to first; uses of one run keep their order."""
        count, order = len(self.run_start), np.argsort(-self.run, kind="stable")
        uses = (each[order] for each in self[3:])
        return Runs(self.run_start[::-1], self.part[::-1], count - 1 - self.run[order], *uses)


def _runs(table: Table, kinds: tuple[Kind, ...], chosen: Mask, part: Ints) -> Runs:
    """Return the runs of rows of some kinds that are about chosen state units; a run stays within a part of rows."""
    using = table.rows_with(*kinds)
    # If none is chosen, rows need not be cut.
    every = of_states(table, using if chosen.any() else using[:0], chosen)
    opens = np.diff(every.row, prepend=-1) != 0  # each row's first entry
    rows, places = every.row[opens], every.places(table)
    layer = np.where(table.group[rows] >= 0, -1 - table.action_first[rows], places[opens])
    changes = (np.diff(layer, prepend=-1) != 0) | (np.diff(part[rows], prepend=-1) != 0)
    changes[:1] = True
    run_start = rows[changes]
    run = (np.cumsum(changes) - 1)[np.cumsum(opens) - 1]
    key = run * num_places(table) + places
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order], append=-1))
    starts = np.append(0, ends[:-1] + 1)[: len(ends)]
    in_turn = np.argsort(order[starts])
    first, last = order[starts][in_turn], order[ends][in_turn]
    size = table.header.state_sizes[table.stage[every.row[first]], every.unit[first]]
    return Runs(run_start, part[run_start], run[first], places[first], size, every.row[first], every.row[last])


def residences(table: Table, written: Ints) -> Residence:
    """Return the gathers and releases of units' weights, for a table whose compute is cut into units.

    written: the first row after the updates that write a version, shape [stages, versions].
    """
    header = table.header
    runs = _runs(table, USES, header.gathered_weights, table.part)
    stays = stays_of(runs, header.states.weight_pool)
    first_use, last_use = runs.first[stays.first_use], runs.last[stays.last_use]
    after_update = written[table.stage[first_use], table.version[first_use]]
    start = np.maximum(runs.run_start[stays.start], after_update)
    return Residence(first_use, last_use, runs.place[stays.first_use] % header.most_states, start)


def last_additions(table: Table) -> StateRows:
    """Return the rows after which sharded gradients are reduced; the table's compute is cut into units.

    The mirror of `residences`: at every run of backwards, the gradients of the last different units that fit into the
    gradient pool are on the rank, added to or on their way. A gradient that is not added to again while it is among
    them is reduced at once: if two units fit, one unit's gradient is on its way while the next unit's is computed.
    """
    header = table.header
    runs = _runs(table, ADDING, header.sharded_gradients, table.rank).reverse()
    uses = stays_of(runs, header.states.gradient_pool).first_use
    uses = uses[np.lexsort((runs.place[uses], -runs.run[uses]))]
    return StateRows(runs.last[uses], runs.place[uses] % header.most_states)


def awaited_reductions(table: Table) -> tuple[Ints, Ints]:
    """Return the rows that open a unit's sharded gradient, and for each the reduction that makes room for it, -1 for
    none."""
    header = table.header
    every = of_states(table, table.rows_with(*ADDING, Kind.REDUCE_GRADIENTS), header.sharded_gradients)
    reducing = table.is_kind(Kind.REDUCE_GRADIENTS)[every.row].tolist()
    sizes = header.state_sizes[table.stage[every.row], every.unit].tolist()
    places, ranks = every.places(table).tolist(), table.rank[every.row].tolist()
    awaited: list[tuple[int, int]] = []
    held: set[int] = set()
    room = [header.states.gradient_pool] * header.num_ranks
    done: list[deque[tuple[int, int]]] = [deque() for _ in room]  # reductions with room left
    entries = zip(every.row.tolist(), places, sizes, reducing, ranks, strict=True)
    for row, place, size, reduces, rank in entries:
        if reduces:
            held.discard(place)
            done[rank].append((row, size))
        elif place not in held:
            held.add(place)
            room[rank] -= size
            last = -1
            while room[rank] < 0 and done[rank]:
                last, freed = done[rank].popleft()
                room[rank] += freed
            awaited.append((row, last))
    opening, freeing = np.array(awaited, dtype=np.int64).reshape(-1, 2).T
    return opening, freeing


class Stays(NamedTuple):
    """One entry per gather, in order: the first and last use of the unit, and the run before which it starts."""

    first_use: Ints
    last_use: Ints
    start: Ints


def stays_of(runs: Runs, pool: int) -> Stays:
    """Return when each unit is held by a rank that holds units up to a total size of ``pool``.

    At each run, the rank holds the next different units, until the pool is full. So a unit is still there at its next
    use if all units that are used from one use to the next fit together with it. A cache that drops the least recently
    used unit follows the same rule, and a gather starts right after the last use of what was dropped most recently.
    Nothing is held from one part of the runs to the next.

    Raises ScheduleError if the units of one run do not fit.
    """
    size = int(runs.size.max(initial=1))
    if (runs.size == size).all() and 1 <= pool // size <= 2:
        alike = (runs.place[1:] == runs.place[:-1]) & (runs.part[runs.run[1:]] == runs.part[runs.run[:-1]])
        if len(runs.run) == len(runs.run_start) and not alike.any():
            return _stays_of_last(runs, pool // size)
    return _stays_by_size(runs, pool)


def _stays_of_last(runs: Runs, room: int) -> Stays:
    """Return the stays if each run uses one unit, a different one from the run before it, and one or two units fit:
    then the rank holds the units of the last one or two runs."""
    use = np.arange(len(runs.run))
    before = use[:-room]
    stays_on = np.zeros(len(use), dtype=np.bool_)
    stays_on[room:] = (runs.place[room:] == runs.place[before]) & (runs.part[room:] == runs.part[before])
    in_turn = np.concatenate([use[first::room] for first in range(room)])
    opens = np.flatnonzero(~stays_on[in_turn])
    first_use, last_use = in_turn[opens], in_turn[np.append(opens[1:], len(use))[: len(opens)] - 1]
    order = np.argsort(first_use)
    part_opens = np.flatnonzero(np.diff(runs.part, prepend=-1))
    start = np.maximum(first_use - room + 1, part_opens[np.searchsorted(part_opens, first_use, side="right") - 1])
    return Stays(first_use[order], last_use[order], start[order])


def _stays_by_size(runs: Runs, pool: int) -> Stays:
    """Return the stays of units of any size, run by run."""
    stays: list[list[int]] = []  # first use, last use and start of each
    held: dict[int, int] = {}  # place of a unit -> its stay; the least recently used first
    of_run, place, size = runs.run.tolist(), runs.place.tolist(), runs.size.tolist()
    part, before, free, start = runs.part.tolist(), -1, pool, 0
    for run, group in groupby(range(len(of_run)), key=of_run.__getitem__):
        if part[run] != before:
            held.clear()
            before, free, start = part[run], pool, run
        uses = list(group)
        for use in uses:
            stay = held.pop(place[use], None)
            if stay is not None:
                held[place[use]] = stay
                stays[stay][1] = use
        for use in uses:
            if place[use] in held:
                continue
            free -= size[use]
            while free < 0:
                dropped, stay = next(iter(held.items()), (-1, -1))
                if stay < 0 or of_run[stays[stay][1]] == run:
                    raise ScheduleError(f"a pool of {pool} has no room for all units that one action uses; enlarge it")
                del held[dropped]
                last_use = stays[stay][1]
                start, free = of_run[last_use] + 1, free + size[last_use]
            held[place[use]] = len(stays)
            stays.append([use, use, start])
    return Stays(*np.array(stays, dtype=np.int64).reshape(-1, 3).T)
