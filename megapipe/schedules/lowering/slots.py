"""Assigning receive slots: as few buffers a stage as the lowered order allows, the same every step."""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megapipe.schedules.actions import SLOT, Ints, Kind
from megapipe.schedules.table import Table


@dataclass(frozen=True)
class Lives:
    """For every receive of one direction, by stage, then by row: the rows between which its buffer is in use."""

    stage: Ints
    microbatch: Ints
    start: Ints
    end: Ints


def receive_lives(table: Table, receive: Kind, release: tuple[Kind, ...]) -> Lives:
    """Lives of the buffers that ``receive`` fills, each until the last ``release`` of its stage and micro-batch."""
    start = table.rows_with(receive)
    start = start[np.argsort(table.stage[start], kind="stable")]
    end = table.last_by_key(*release)[table.key[start]]
    return Lives(table.stage[start].astype(np.int64), table.microbatch[start].astype(np.int64), start, end)


def activation_releases(mode: str) -> tuple[Kind, ...]:
    """Kinds whose last action frees the input activation of a stage."""
    return (Kind.FORWARD,) if mode == "forward" else (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


GRADIENT_RELEASES = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Kinds whose last action frees the gradient that a stage received: the weight half may need that very tensor."""


def assign_slots(table: Table, *, flushes: bool) -> Table:
    """Fill the slot column of receives and of the compute rows that read them, and the header's slot counts."""
    header = table.header
    rows = table.rows.copy()
    opens = table.opens_chunk()
    counts = []
    for receive, users, release in (
        (Kind.RECV_ACTIVATION, (Kind.FORWARD,), activation_releases(header.mode)),
        (Kind.RECV_GRADIENT, (Kind.BACKWARD, Kind.BACKWARD_INPUT), GRADIENT_RELEASES),
    ):
        lives = receive_lives(table, receive, release)
        slots, count = _colour(lives, table.num_stages, None if flushes else header.num_microbatches)
        counts.append(count)
        rows[lives.start, SLOT] = slots
        slot_of = np.full(table.num_stages * table.num_microbatches, -1, dtype=np.int64)
        slot_of[table.key[lives.start]] = slots
        reading = np.flatnonzero(table.is_kind(*users) & opens)
        rows[reading, SLOT] = slot_of[table.key[reading]]
    header = replace(header, activation_slots=counts[0], gradient_slots=counts[1])
    return replace(table, header=header, rows=rows)


def _colour(lives: Lives, num_stages: int, period: int | None) -> tuple[Ints, tuple[int, ...]]:
    """Return the slots of all lives, and the number of slots of each stage. If there is a period, the slots repeat
    after that number of micro-batches."""
    slots = np.empty(len(lives.stage), dtype=np.int64)
    bounds = np.searchsorted(lives.stage, np.arange(num_stages + 1)).tolist()
    counts = []
    for first, last in pairwise(bounds):
        part = slice(first, last)
        if first == last:
            counts.append(0)
            continue
        start, end = lives.start[part], lives.end[part]
        in_order = bool(np.all(end[1:] >= end[:-1]))
        index = np.arange(last - first)
        most_live = int((index - np.searchsorted(np.sort(end), start)).max()) + 1
        if period is not None:
            slots[part] = _periodic(lives.microbatch[part], period, most_live, in_order)
        elif in_order:
            slots[part] = index % most_live
        else:
            slots[part] = _first_free(start.tolist(), end.tolist())
        counts.append(int(slots[part].max()) + 1)
    return slots, tuple(counts)


def _periodic(microbatch: Ints, period: int, most_live: int, in_order: bool) -> Ints:
    """Slots that depend on ``microbatch % period`` alone.

    Lives that begin and end in order overlap at most ``most_live`` in a row: the period is cut into blocks of at
    least that length and each block counts its slots from 0. Others get one slot for each micro-batch of the period.
    """
    place = microbatch % period
    if not in_order or most_live > period or np.any(np.diff(microbatch) < 0):
        return place
    blocks = period // most_live
    starts = np.arange(blocks) * period // blocks
    slots: Ints = place - starts[np.searchsorted(starts, place, side="right") - 1]
    return slots


def _first_free(start: list[int], end: list[int]) -> list[int]:
    """The lowest slot that is free at each start."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots = []
    for begin, finish in zip(start, end, strict=True):
        while busy and busy[0][0] < begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (finish, slot))
        slots.append(slot)
    return slots
