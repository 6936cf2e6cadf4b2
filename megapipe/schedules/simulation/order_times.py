"""Times of a schedule's compute actions and messages, for many sets of costs over one graph.

The simulator runs a lowered schedule action by action. This walk takes the order of compute actions before lowering,
finds once which of them wait for which, and then times any number of cost vectors level by level: every action of a
level starts after the end of at most two others. Results are those of `simulate` without reductions, gathers, updates
and copies to host memory.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megapipe.schedules.actions import BACKWARDS, KIND, MICROBATCH, STAGE, Floats, Ints, Kind, Mask
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table

ROUNDING = 1e-12
"""Relative difference of times up to which they are equal."""


class OrderCosts(NamedTuple):
    """Seconds of one or several layouts of the same order.

    forward, backward, backward_input, backward_weight: of a micro-batch in a stage, shape [layouts, stages].
    before_forward, before_backward: of work right before a forward, and before a backward or its input half, that does
    not wait for the message, such as recomputation. latency, transfer: of a message from a rank (second index) to
    another one, shape [layouts, ranks, ranks]; it keeps the link busy for `transfer` and arrives `latency` later.
    after_backward: of work that follows a backward and delays only the next backward of its rank, or the rank's end,
    such as sums of gradients; none by default.
    """

    before_forward: Floats
    forward: Floats
    before_backward: Floats
    backward: Floats
    backward_input: Floats
    backward_weight: Floats
    latency: Floats
    transfer: Floats
    after_backward: Floats | None = None

    def repeated(self, times: int) -> "OrderCosts":
        """Return the costs of a number of equal layouts for each layout."""
        costs = (None if each is None else np.repeat(each, times, axis=0) for each in self)
        return OrderCosts(*costs)  # type: ignore[arg-type]


class OrderGraph:
    """The waits among the compute actions and messages of a schedule.

    Nodes are numbered level by level; node 0 is the start. Node n ends at
    ``max(end[first[n]] + early[n], end[second[n]] + late[n]) + duration[n]``: for an action, `first` is the previous
    action of its rank and `second` the message that it takes; for a message, the action that sends it and the previous
    message on the link. A group of rows, which is one action, is a chain of nodes (`_Nodes`).

    Args:
        schedule: compute actions alone.
        steps: optimizer steps, of which a schedule that never flushes needs at least one for its prologue.

    Raises:
        ScheduleError: its ranks wait for each other in a cycle.
    """

    def __init__(self, schedule: Schedule, steps: int = 1) -> None:
        table, header = Table.unroll(schedule, steps), schedule.header
        columns = table.rows[:, [KIND, STAGE, MICROBATCH]].T
        self._kind, self._stage, self._microbatch = columns.astype(np.int64)
        rank_starts = table.offsets[:-1]
        nodes = _Nodes.of(table.action_first, table.action_last)
        self._timed, count = nodes.timed_by_row, len(nodes.row)
        taker, self._sender = Dependencies(table).sent()
        # Message i is node count + 1 + i.
        message = np.arange(len(self._sender))
        self._taken = np.zeros(count, dtype=np.int64)
        self._taken[nodes.taker_by_row[taker]] = message + 1
        leaves = nodes.sender_by_row[self._sender] + 1
        self._starts = starts = np.searchsorted(nodes.row, rank_starts)
        previous = np.arange(count)
        previous[starts[starts < count]] = 0
        link = table.rank[self._sender] * header.num_ranks + table.rank[taker]
        by_link = np.argsort(link, kind="stable")
        following = np.flatnonzero(np.diff(link[by_link]) == 0)
        before = np.zeros(len(message), dtype=np.int64)
        before[by_link[following + 1]] = count + 1 + by_link[following]
        sent = self._microbatch[self._sender][by_link]
        at = self._microbatch[nodes.row]
        jumps = np.abs(at - at[previous - 1])[previous > 0]
        self._longest_jump = int(max(jumps.max(initial=0), np.abs(np.diff(sent))[following].max(initial=0)))
        taken = np.where(self._taken > 0, count + self._taken, 0)
        first, second = np.concatenate([[0], previous, leaves]), np.concatenate([[0], taken, before])
        levels = _levels(np.concatenate([previous, before]), np.concatenate([taken, leaves]), header.name)
        order = np.concatenate([[0], *levels])
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        first, second = number[first[order]], number[second[order]]
        # Each level has an edge to every `first`, then to every `second` of its nodes.
        sizes = np.array([1, *map(len, levels)])
        stops = np.cumsum(sizes)
        place = np.arange(len(order)) + np.repeat(stops - sizes, sizes)
        self._edge = np.empty(2 * len(order), dtype=np.int64)
        self._edge[np.append(place, place + np.repeat(sizes, sizes))] = np.arange(2 * len(order))
        self._predecessor = np.append(first, second)[self._edge]
        self._levels = list(pairwise(stops.tolist()))
        self._number = number[1:]
        # Places in the tables of `ends`, where row 0 is 0.
        places, none = len(Kind) * len(header.stages), np.zeros(len(message), dtype=np.int64)
        placed = (1 + self._kind * len(header.stages) + self._stage)[nodes.row]
        links = 1 + link
        durations = np.where(nodes.timed, placed, np.where(nodes.early, places + placed, 0))
        self._duration_at = np.concatenate([[0], durations, 2 * places + links])[order]
        self._early_at = np.concatenate([[0], np.where(nodes.opens, placed, 0), none])[order]
        preceding, self._last_backward = _backwards_before(self._kind, self._stage, rank_starts)
        # The work after a backward is added to the work right before the next one, at the nodes that have such work.
        delayed = np.where(nodes.early | nodes.opens, 1 + preceding[nodes.row], 0)
        self._delayed_at = np.concatenate([[0], delayed, none])[order]
        self._delays_action = np.concatenate([[0], nodes.early, none]).astype(np.bool_)[order]
        self._late_at = np.concatenate([[0], np.append(0, links)[self._taken], none])[order]

    def ends(self, costs: OrderCosts) -> Floats:
        """Return the end of each action, and of each message on its link; shape [nodes, layouts]."""
        layouts, stages = costs.forward.shape
        phases, before = np.zeros((len(Kind), stages, layouts)), np.zeros((len(Kind), stages, layouts))
        phases[Kind.FORWARD], phases[Kind.BACKWARD] = costs.forward.T, costs.backward.T
        phases[Kind.BACKWARD_INPUT], phases[Kind.BACKWARD_WEIGHT] = costs.backward_input.T, costs.backward_weight.T
        before[Kind.FORWARD] = costs.before_forward.T
        before[list(BACKWARDS)] = costs.before_backward.T
        zero = np.zeros((1, layouts))
        transfer, latency = (each.reshape(layouts, -1).T for each in (costs.transfer, costs.latency))
        works = [zero, phases.reshape(-1, layouts), before.reshape(-1, layouts), transfer]
        duration = np.concatenate(works).take(self._duration_at, 0)
        early = np.concatenate([zero, before.reshape(-1, layouts)]).take(self._early_at, 0)
        late = np.concatenate([zero, latency]).take(self._late_at, 0)
        if costs.after_backward is not None:
            delays = np.concatenate([zero, costs.after_backward.T]).take(self._delayed_at, 0)
            duration += np.where(self._delays_action[:, None], delays, 0.0)
            early += np.where(self._delays_action[:, None], 0.0, delays)
        waits = np.append(early, late, 0).take(self._edge, 0)
        waits += duration.take(self._predecessor, 0)
        start = np.zeros_like(duration)
        for first, stop in self._levels:
            edges, size = slice(2 * first, 2 * stop), stop - first
            ready = start.take(self._predecessor[edges], 0)
            ready += waits[edges]
            np.maximum(ready[:size], ready[size:], out=start[first:stop])
        ends: Floats = start + duration
        return ends

    def finish(
        self, ends: Floats, after_backward: Floats | None = None, afters: Sequence[Floats | float] = (0.0,)
    ) -> Floats:
        """Return the end of the last rank for each of `afters`, shape [afters, layouts].

        ends: by `ends`. after_backward: of the costs. afters: seconds of work that follows each rank's last action,
        shape [ranks], or one number for all ranks.
        """
        last = np.maximum.reduceat(ends[self._number[: len(self._taken)]], self._starts)
        if after_backward is not None:
            last = last + np.where(self._last_backward >= 0, after_backward[:, self._last_backward], 0.0).T
        return np.stack([(last.T + after).max(axis=1) for after in afters])

    def slope(self, ends: Floats, period: int) -> Floats | None:
        """Return the seconds by which a step of the same order takes longer with `period` more micro-batches.

        None if the step is not in a steady state: the state of all ranks and links must repeat after each period, for
        at least the largest difference between the micro-batches of neighbouring actions of a rank. Then all that
        follows repeats as well. ends: by `ends`.
        """
        grid = self._grid
        needed = self._longest_jump + period
        last = grid.shape[1] - needed
        if last - needed < period:
            return None
        window = grid[:, last - needed : last]
        later = ends[window] - ends[grid[:, last - needed - period : last - period]]
        growth, unlike = later[0, 0], np.ptp(later, axis=(0, 1))
        return growth if (unlike <= ROUNDING * growth).all() else None

    @cached_property
    def _grid(self) -> Ints:
        """Return the nodes by place and micro-batch; a place is the kind and stage of an action, or of the message
        that follows it. Shape [places, micro-batches], or [0, 0] if not every micro-batch passes all stages."""
        place = self._kind * (int(self._stage.max()) + 1) + self._stage
        places = np.append(place, int(place.max()) + 1 + place[self._sender])
        microbatch = np.append(self._microbatch, self._microbatch[self._sender])
        count = int(microbatch.max()) + 1
        if np.count_nonzero(np.bincount(places)) * count != len(places):
            return np.zeros((0, 0), dtype=np.int64)
        number = np.append(self._number[self._timed], self._number[len(self._taken) :])
        return number[np.lexsort([microbatch, places])].reshape(-1, count)


class _Nodes(NamedTuple):
    """Nodes of the compute rows of a schedule, in program order; a row that is an action by itself is one node.

    A group starts when its rank is free and all messages for its rows have arrived, runs its rows in their order, and
    sends when all have ended. Work right before a row, such as recomputation, is before the whole group and waits for
    no message. So a group is a chain: such work of all rows, the messages of all but the first one, the rows, and the
    moments at which the results of all but the last one leave.

    row: of each node. timed, early: whether it takes the row's time, or that of the work right before the row. opens:
    whether such work delays the row itself. timed_by_row, taker_by_row, sender_by_row: the nodes that take each row's
    time, take the row's message, and send its result.
    """

    row: Ints
    timed: Mask
    early: Mask
    opens: Mask
    timed_by_row: Ints
    taker_by_row: Ints
    sender_by_row: Ints

    @classmethod
    def of(cls, first: Ints, last: Ints) -> "_Nodes":
        """Return the nodes of rows. first, last: rows of the action that each row belongs to."""
        rows = np.arange(len(first))
        grouped, none = first < last, np.zeros_like(first)
        waits, leaves = grouped & (rows > first), grouped & (rows < last)
        row, part = rows, none + 2
        if grouped.any():
            chosen = np.concatenate([grouped, waits, np.ones_like(grouped), leaves])
            row, part = np.tile(rows, 4)[chosen], np.repeat(np.arange(4), len(rows))[chosen]
            order = np.lexsort([row, part, first[row]])
            row, part = row[order], part[order]
        number = np.zeros((4, len(rows)), dtype=np.int64)
        number[part, row] = np.arange(len(row))
        timed = part == 2
        takers, senders = np.where(waits, number[1], number[2]), np.where(leaves, number[3], number[2])
        return cls(row, timed, part == 0, timed & ~grouped[row], number[2], takers, senders)


def _backwards_before(kind: Ints, stage: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return for each backward, or input half, the stage of the backward before it on its rank, and for each rank the
    stage of its last backward; -1 where there is none. starts: the first row of each rank."""
    rows = np.flatnonzero((kind == Kind.BACKWARD) | (kind == Kind.BACKWARD_INPUT))
    rank = np.searchsorted(starts, rows, side="right")
    before, last = np.full(len(kind), -1), np.full(len(starts), -1)
    same = rank[1:] == rank[:-1]
    before[rows[1:][same]] = stage[rows[:-1][same]]
    last[rank - 1] = stage[rows]
    return before, last


def _levels(same: Ints, other: Ints, name: str) -> list[Ints]:
    """Return the nodes from 1 on level by level: each after the last of its predecessors.

    same, other: for each node from 1 on the one before it on its rank or link, and the message that an action takes or
    the action that sends a message; 0 where there is none. No node comes twice in one of them.
    """
    count = len(same) + 1
    nodes = np.arange(1, count)
    # A node is number n as successor by `same`, and count + n as successor by `other`; 2 * count is none.
    after = np.full((2, count), 2 * count)
    for row, before, shift in zip(after, (same, other), (0, count), strict=True):
        row[before[before > 0]] = nodes[before > 0] + shift
    partner = np.concatenate([[0], other, [0], np.where(same > 0, count + same, 0), [2 * count]])
    # A level later in the second half: of two predecessors of one level, only that by `other` makes a node ready.
    level = np.full(2 * count + 1, count)
    level[0] = -1
    levels: list[Ints] = []
    ready = nodes[(same == 0) & (other == 0)]
    while len(ready):
        level[ready], level[ready + count] = len(levels), len(levels) + 1
        levels.append(ready)
        following = after.take(ready, 1).ravel()
        ready = following[level.take(partner.take(following)) < len(levels)] % count
    if sum(map(len, levels)) < count - 1:
        raise ScheduleError(f"the ranks of {name} wait for each other in a cycle")
    return levels
