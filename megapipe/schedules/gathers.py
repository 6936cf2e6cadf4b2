"""Sharded weights and gradients: when they are gathered, released and reduced, with so many buffers a rank (ZeRO-3).

Weights in host memory come and go by the same rule: a gather is a copy to the device then.

A *run* is a stretch of neighbouring compute actions of a rank that use one unit's weights. While a run computes, the
rank holds, or is gathering, the first ``weight_buffers`` different units that are used from there on: one buffer means
no prefetch, two mean one unit ahead. No unit is dropped while it is among them, so no order of gathers with as many
buffers gathers less. Weight halves of split backwards work on kept inputs and output gradients and use no weights.

A schedule that never flushes keeps several versions of a unit's weights, and gradients of several updates. Each is
held like a unit of its own. No version is gathered before the update that writes it, and none stays on hand from one
section to the next: what comes after a section depends on whether the run goes on.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megapipe.schedules.actions import Ints, Kind, Mask
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table

USES = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""Kinds that compute with a unit's weights."""


@dataclass(frozen=True)
class Residence:
    """One entry a gather: compute rows of its first and last use, and the row ahead of which it starts."""

    first_use: Ints
    last_use: Ints
    start: Ints


def check_weight_buffers(schedule: Schedule) -> None:
    """Raise ScheduleError where a schedule cannot run on sharded weights or gradients."""
    header = schedule.header
    if header.weights_in_host and not header.weight_buffers:
        raise ScheduleError(
            f"{header.name} keeps its weights in host memory but has no buffers to copy them to; set weight_buffers "
            "to at least 1"
        )
    shared = header.weight_buffers > 0 and not header.weights_in_host
    if shared and header.mode == "train" and not header.data_parallel:
        raise ScheduleError(
            f"{header.name} asks for {header.weight_buffers} weight buffers without data parallelism: there is no "
            "rank to gather from; set data_parallel, or leave weight_buffers out"
        )
    if header.whole_gradients and header.mode == "train" and not header.data_parallel:
        raise ScheduleError(
            f"{header.name} asks for {header.whole_gradients} whole gradients without data parallelism: there is no "
            "rank to shard them with; set data_parallel, or leave whole_gradients out"
        )
    if header.zero_stages and tuple(map(len, header.zero_stages)) != header.units_per_stage:
        raise ScheduleError(
            f"{header.name} has ZeRO stages of {list(map(len, header.zero_stages))} units by stage, but stages have "
            f"{list(header.units_per_stage)} units; give one for each unit"
        )
    if header.weights_in_host and not schedule.flushes:
        raise ScheduleError(
            f"{header.name} never flushes and keeps several weight versions on the device; use a schedule that "
            "flushes, or leave weights_in_host out"
        )


def places(table: Table, rows: Ints) -> Ints:
    """One number for each stage, update (and so weight version) and unit that rows cut into units belong to."""
    update = table.stage[rows].astype(np.int64) * table.num_updates + table.update[rows]
    return update * max(table.header.units_per_stage) + table.unit[rows]


def of_sharded_weights(table: Table, rows: Ints) -> Mask:
    """Return which rows that are cut into units concern a unit whose weights are sharded."""
    return table.header.sharded_weights[table.stage[rows], table.unit[rows]]


def of_sharded_gradients(table: Table, rows: Ints) -> Mask:
    """Return which rows that are cut into units concern a unit whose gradients are sharded."""
    return table.header.sharded_gradients[table.stage[rows], table.unit[rows]]


def residences(table: Table, written: Ints) -> Residence:
    """When units' weights are on hand, in a table whose compute is cut into units.

    written: by stage and version, shape [stages, versions], the first row of which an update has made it.
    """
    rows = table.rows_with(*USES)
    rows = rows[of_sharded_weights(table, rows)]
    unit, part = places(table, rows), table.rank[rows] * table.num_sections + table.section[rows]
    opens = np.flatnonzero(np.append(True, (unit[1:] != unit[:-1]) | (np.diff(part) != 0)))
    first, last = rows[opens], rows[np.append(opens[1:], len(rows)) - 1]
    parts = np.searchsorted(part[opens], np.arange(table.header.num_ranks * table.num_sections + 1)).tolist()
    units, buffers = unit[opens].tolist(), table.header.weight_buffers
    stays = [
        first_run + np.array(stays_of(units[first_run:end], buffers), dtype=np.int64)
        for first_run, end in pairwise(parts)
    ]
    first_use, last_use, start = np.concatenate(stays, axis=1)
    use = first[first_use]
    return Residence(use, last[last_use], np.maximum(first[start], written[table.stage[use], table.version[use]]))


ADDING = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Kinds that add to a unit's gradient."""


def last_additions(table: Table) -> Ints:
    """Rows behind which gradients are reduced where they are sharded; the table's compute is cut into units.

    The mirror of `residences`: at every run of backwards the gradients of the last ``whole_gradients`` different units
    are on the rank, added to or on their way. What is not added to again among them is reduced at once, so that with
    two buffers one unit's is on its way while the next unit's is computed.
    """
    rows = table.rows_with(*ADDING)
    rows = rows[of_sharded_gradients(table, rows)]
    unit = places(table, rows)
    closes = np.flatnonzero(np.append((unit[1:] != unit[:-1]) | (np.diff(table.rank[rows]) != 0), True))
    last, rank = rows[closes], table.rank[rows[closes]]
    reduced: list[int] = []
    for first, end in pairwise(np.searchsorted(rank, np.arange(table.header.num_ranks + 1)).tolist()):
        backwards = unit[closes][first:end][::-1].tolist()
        reduced += [end - 1 - use for use in stays_of(backwards, table.header.whole_gradients).first_use]
    return last[np.sort(np.array(reduced, dtype=np.int64))]


def awaited_reductions(table: Table) -> tuple[Ints, Ints]:
    """Rows that open a unit's gradient in a buffer, and for each the reduction that frees the buffer, -1 for none."""
    opening: list[int] = []
    freeing: list[int] = []
    rows = table.rows_with(*ADDING, Kind.REDUCE_GRADIENTS) if table.header.whole_gradients else np.empty(0, np.int64)
    rows = rows[of_sharded_gradients(table, rows)]
    reducing = table.is_kind(Kind.REDUCE_GRADIENTS)[rows].tolist()
    ranks, units = table.rank[rows].tolist(), places(table, rows).tolist()
    held: set[int] = set()
    opened: Counter[int] = Counter()
    reductions: dict[int, list[int]] = {}
    for row, rank, unit, reduces in zip(rows.tolist(), ranks, units, reducing, strict=True):
        if reduces:
            held.discard(unit)
            reductions.setdefault(rank, []).append(row)
        elif unit not in held:
            held.add(unit)
            number = opened[rank] - table.header.whole_gradients
            done = reductions.get(rank, [])
            opening.append(row)
            freeing.append(done[number] if 0 <= number < len(done) else -1)
            opened[rank] += 1
    return np.array(opening, dtype=np.int64), np.array(freeing, dtype=np.int64)


class Stays(NamedTuple):
    """One entry per gather of a rank, in order: runs of the first and last use, and the run before which it starts."""

    first_use: list[int]
    last_use: list[int]
    start: list[int]


def stays_of(units: list[int], buffers: int) -> Stays:
    """Return when each unit is in one of ``buffers`` buffers (at least 1). units: the unit of each run of one rank.

    At each run, the next ``buffers`` different units are on the rank. So a unit is still there at its next use if at
    most ``buffers`` different units are used from one use to the next. A cache that drops the least recently used
    unit follows the same rule, and the gather that fills the buffer starts right after the dropped unit's last use.
    """
    stays = Stays([], [], [])
    held: dict[int, int] = {}  # unit -> its stay, the least recently used unit first
    for run, unit in enumerate(units):
        stay = held.pop(unit, None)
        if stay is None:
            stay = len(stays.start)
            stays.start.append(stays.last_use[held.pop(next(iter(held)))] + 1 if len(held) == buffers else 0)
            stays.first_use.append(run)
            stays.last_use.append(run)
        else:
            stays.last_use[stay] = run
        held[unit] = stay
    return stays
