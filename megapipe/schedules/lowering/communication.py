"""Adding sends and receives: receives are posted early enough that nothing can hang, into as few slots as possible.

Slots are the same every step.
"""

import heapq
import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megapipe.schedules.actions import BACKWARDS, GRADIENT_KINDS, SLOT, Ints, Kind, Mask, describe, rows_of
from megapipe.schedules.dependencies import NO_NEEDS, Dependencies, Needs, Progress, against_all, shard_passes
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering.insertion import Insertion, InsertionOrder, insertion_order, new_indices
from megapipe.schedules.memory import READERS, receive_lives, slots_read
from megapipe.schedules.table import Table, action_at, failure


class Posts(NamedTuple):
    """The place of each message's receive: before compute row ``row``. Receives at one row are in the order of
    ``turn``.

    late: whether the receive is posted after the group of this row, right before what the row sends.
    """

    row: Ints
    turn: Ints
    late: Mask


@dataclass(frozen=True)
class MessageTable:
    """One entry per message, ordered by link (pair of ranks), then by the time of sending.

    ``producer`` and ``consumer`` are the compute rows at both ends, ``link`` numbers the pair of ranks.
    """

    gradient: Ints
    producer: Ints
    consumer: Ints
    link: Ints

    @classmethod
    def of(cls, table: Table) -> "MessageTable":
        """Return the messages that a program of compute rows needs: forwards to the next stage, gradients to the
        previous one."""
        consumer, producer = Dependencies(table).sent()
        link = table.rank[producer] * table.header.num_ranks + table.rank[consumer]
        order = np.argsort(link, kind="stable")
        gradient = table.is_kind(*BACKWARDS)[producer].astype(np.int64)
        return cls(*(each[order] for each in (gradient, producer, consumer, link)))

    @cached_property
    def follows(self) -> Ints:
        """Indices of the messages that are not the first of their link."""
        return np.flatnonzero(self.link[1:] == self.link[:-1]) + 1

    def receives(self, table: Table, posts: Posts) -> Insertion:
        """Return the receives, each before its compute row on the consumer's rank."""
        order = np.argsort(posts.turn)
        kind = np.where(self.gradient == 1, int(Kind.RECV_GRADIENT), int(Kind.RECV_ACTIVATION))
        rows = rows_of(kind, table.stage[self.consumer], table.microbatch[self.consumer])
        section = table.section[self.consumer][order]
        return Insertion(rows[order], posts.row[order], InsertionOrder.RECEIVE, section, posts.late[order])

    def sends(self, table: Table) -> Insertion:
        """Return the sends, each right after the compute row that makes the message."""
        kind = np.where(self.gradient == 1, int(Kind.SEND_GRADIENT), int(Kind.SEND_ACTIVATION))
        rows = rows_of(kind, table.stage[self.producer], table.microbatch[self.producer])
        return Insertion(rows, self.producer, InsertionOrder.SEND, table.section[self.producer])


def place_receives(table: Table, messages: MessageTable, receive_ahead: int) -> Posts:
    """Return the compute row before which each message's receive is posted.

    It is ``receive_ahead`` compute rows before its use, within its section, on each link in the order of the sends,
    and not before the row that uses the link's previous message: on a GPU that starts operations in the order of their
    launch (CUDA_DEVICE_MAX_CONNECTIONS=1), a receive that waits for the receive before it holds back everything
    launched after it.

    Where sends that wait for their receive would hang, all are posted one row earlier, which is often enough where
    ranks send in a ring, as interleaved chunks do. Those that still hang are posted at the row where the receiving
    rank waits. If ranks still hang, each receive is posted right before its use, and then those that hang are posted
    at the row where their rank waits.
    """
    use = table.action_first[messages.consumer]
    section_start = np.searchsorted(table.part, table.part[use])
    first = np.maximum(section_start, _slot_free(table, messages))
    after = messages.follows
    first[after] = np.maximum(first[after], use[after - 1])
    for distance in (receive_ahead, receive_ahead + 1, 0):
        row = np.minimum(np.maximum(use - distance, first), use)
        posts = Posts(_in_send_order(messages, row, len(table.rows)), np.arange(len(row)), np.zeros(len(row), bool))
        progress = _progress(table, messages, posts)
        stuck = progress.stuck()
        if len(stuck) > 0 and distance != receive_ahead:
            posts, stuck = _early_enough(table, messages, posts, progress, stuck)
        if len(stuck) == 0:
            break
    if len(stuck) > 0:
        raise ScheduleError(
            f"{table.header.name} deadlocks: its compute actions wait for each other in a cycle: "
            + "; ".join(
                f"{table.place_of(row)} at {describe(action_at(table, row), table.header.slices)}"
                for row in _waiting_rows(table, messages, posts)[stuck].tolist()
            )
            + "; change the order on one of these ranks"
        )
    if np.any(posts.row < section_start):
        problem = "its receive would have to be posted before its section starts"
        remedy = "use micro-batches in the order in which the other rank sends them"
        raise failure(table, int(messages.consumer[np.argmax(posts.row < section_start)]), f"{problem}; {remedy}")
    return posts


def _slot_free(table: Table, messages: MessageTable) -> Ints:
    """Return the first compute row at which the slot of each message is free: after the backward of the same
    micro-batch of the step before, since slots are the same every step."""
    period = table.header.num_microbatches
    done = table.last_by_key(*GRADIENT_KINDS)
    last = table.action_last[done[table.key[messages.consumer] - period]]
    return np.where(table.microbatch[messages.consumer] < period, 0, last + 1)


def _in_send_order(messages: MessageTable, post: Ints, num_rows: int) -> Ints:
    """Post no receive after one that the same link delivers later: a running minimum from each link's end."""
    lift = messages.link * (num_rows + 1)  # keeps a link's minimum below earlier ones
    return np.minimum.accumulate((post + lift)[::-1])[::-1] - lift


def _progress(table: Table, messages: MessageTable, posts: Posts) -> Progress:
    """Return the ranks' progress with these posts. Sends wait for their receive, uses for their send, a receive for
    the send before it on its link; a pass of a shard of the vocabulary also waits until all ranks have come to it."""
    index = new_indices(insertion_order(table, [messages.sends(table), messages.receives(table, posts)]))
    num_compute, num_messages = len(table.rows), len(messages.producer)
    send = index[num_compute : num_compute + num_messages]
    receive = np.empty_like(send)
    receive[np.argsort(posts.turn)] = index[num_compute + num_messages :]
    use, after = index[table.action_first[messages.consumer]], messages.follows
    shards, meetings = Dependencies(table).shard_needs, _meetings(table)
    waiting = [send, use, receive[after], index[shards.row], index[meetings.row]]
    needed = [receive, send, send[after - 1], index[shards.needed], index[meetings.needed] - 1]
    rows = np.concatenate([table.rank, table.rank[messages.producer], table.rank[messages.consumer]])
    offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=table.header.num_ranks)))
    return Progress(np.concatenate(waiting), np.concatenate(needed), offsets)


def _waiting_rows(table: Table, messages: MessageTable, posts: Posts) -> Ints:
    """Return the compute row at which a rank is in each wait of `_progress`."""
    shards = Dependencies(table).shard_needs.row
    meetings = _meetings(table).row
    return np.concatenate([messages.producer, messages.consumer, posts.row[messages.follows], shards, meetings])


def _meetings(table: Table) -> Needs:
    """Return passes of shards of the vocabulary, and the passes of other ranks that have the same collectives."""
    passes = shard_passes(table)
    if not passes or len({*map(len, passes)}) > 1:
        return NO_NEEDS
    by_rank = np.stack(passes)
    row, needed = against_all(by_rank, by_rank)
    later = (row != needed) & (needed > table.offsets[table.rank[needed]])
    return Needs(row[later], needed[later])


def _early_enough(
    table: Table, messages: MessageTable, posts: Posts, progress: Progress, stuck: Ints
) -> tuple[Posts, Ints]:
    """Move receives to the row at which their rank waits when all ranks hang, one hang after another.

    Also return the waits in which ranks still hang at the end. Everything that a link delivered before is posted and
    complete by then, so its receives stay in the order of the sends, unless a moved one comes before several receives
    of one row.
    """
    count, first_stuck, after = len(posts.row), stuck, messages.follows
    waiting_rows = _waiting_rows(table, messages, posts)
    row, turn, late = posts.row.copy(), posts.turn.copy(), posts.late.copy()
    for moved in itertools.count():
        if len(stuck) == 0:
            break
        at = waiting_rows[stuck]
        frontier = np.full(table.header.num_ranks, -1, dtype=np.int64)
        frontier[table.rank[at]] = stuck
        blocked = stuck[stuck < count]
        wait = frontier[table.rank[messages.consumer[blocked]]]
        if len(blocked) == 0:
            break
        row[blocked] = waiting_rows[wait]
        # A group sends its results one by one after all of its rows, so a receive may be posted between two sends.
        late[blocked] = (wait < count) & (table.action_first < table.action_last)[row[blocked]]
        # Post it before the receive at which the rank hangs, or after the receives that the rank has already posted.
        receiving = (wait >= 2 * count) & (wait < 2 * count + len(after))
        turn[blocked] = moved + np.where(receiving, -count, count)
        progress.release(blocked)
        stuck = progress.stuck()
    posts = Posts(row, turn, late)
    before = after - 1
    if np.any((row[before] > row[after]) | ((row[before] == row[after]) & (turn[before] > turn[after]))):
        return posts, first_stuck
    return posts, _progress(table, messages, posts).stuck()


def assign_slots(table: Table) -> Table:
    """Fill the slot column of receives and of the compute rows that read them, and the header's slot counts."""
    header = table.header
    rows = table.rows.copy()
    counts = []
    for receive, readers in READERS:
        start, end = receive_lives(table, receive)
        slots, count = _colour(table, start, end)
        counts.append(count)
        rows[start, SLOT] = slots
        reading, read = slots_read(table, start, slots, readers)
        rows[reading, SLOT] = read
    header = replace(header, activation_slots=counts[0], gradient_slots=counts[1])
    return replace(table, header=header, rows=rows)


def _colour(table: Table, starts: Ints, ends: Ints) -> tuple[Ints, tuple[int, ...]]:
    """Return the slots of all lives, which are by stage, and the number of slots of each stage. If the schedule never
    flushes, the slots repeat after the micro-batches of a step."""
    slots = np.empty(len(starts), dtype=np.int64)
    bounds = np.searchsorted(table.stage[starts], np.arange(table.num_stages + 1)).tolist()
    counts = []
    for first, last in pairwise(bounds):
        part = slice(first, last)
        if first == last:
            counts.append(0)
            continue
        start, end = starts[part], ends[part]
        in_order = bool(np.all(end[1:] >= end[:-1]))
        index = np.arange(last - first)
        most_live = int((index - np.searchsorted(np.sort(end), start)).max()) + 1
        if not table.flushes:
            slots[part] = _periodic(table, start, most_live, in_order)
        elif in_order:
            slots[part] = index % most_live
        else:
            slots[part] = _first_free(start.tolist(), end.tolist())
        counts.append(int(slots[part].max()) + 1)
    return slots, tuple(counts)


def _periodic(table: Table, start: Ints, most_live: int, in_order: bool) -> Ints:
    """Return slots of lives that depend on the place of their micro-batch in a step, the period, alone.

    Of lives that start and end in order, at most ``most_live`` adjacent ones overlap: the period is cut into blocks of
    at least that length and each block counts its slots from 0. Others get one slot for each micro-batch of the
    period.
    """
    period = table.header.num_microbatches
    microbatch = table.microbatch[start].astype(np.int64)
    place = microbatch % period
    if not in_order or most_live > period or np.any(np.diff(microbatch) < 0):
        return place
    blocks = period // most_live
    starts = np.arange(blocks) * period // blocks
    return place - starts[np.searchsorted(starts, place, side="right") - 1]


def _first_free(start: list[int], end: list[int]) -> list[int]:
    """Return the lowest slot that is free at each start."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots = []
    for first_row, last_row in zip(start, end, strict=True):
        while busy and busy[0][0] < first_row:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last_row, slot))
        slots.append(slot)
    return slots
