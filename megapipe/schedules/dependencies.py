"""What every action needs before it can start, derived from the kinds alone. Validator and simulator read this table.

Needs within one rank are settled by program order; needs across ranks by messages and collectives, which ranks wait
for. All functions expect a table whose rows are well formed and complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megapipe.schedules.actions import Ints, Kind
from megapipe.schedules.gathers import (
    ADDING,
    USES,
    awaited_reductions,
    of_sharded_gradients,
    of_sharded_weights,
    places,
)
from megapipe.schedules.offload import move_needs, reload_needs
from megapipe.schedules.table import Table, first_row_per, last_row_per
from megapipe.schedules.tied_uses import local_uses, readers_of_state

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""Kinds that make the gradient of a stage's input."""


@dataclass(frozen=True)
class Needs:
    """``row[i]`` needs ``needed[i]`` done first."""

    row: Ints
    needed: Ints

    def where_known(self) -> "Needs":
        """Only the entries that have both rows (-1 marks none)."""
        known = (self.row >= 0) & (self.needed >= 0)
        return Needs(self.row[known], self.needed[known])


@dataclass(frozen=True)
class Messages:
    """One entry a message: the row that sends it, the row that receives it, the first row that reads it."""

    send: Ints
    receive: Ints
    use: Ints


@dataclass(frozen=True)
class Dependencies:
    """The needs of one table."""

    table: Table

    @cached_property
    def _forward(self) -> tuple[Ints, Ints]:
        return self.table.first_by_key(Kind.FORWARD), self.table.last_by_key(Kind.FORWARD)

    @cached_property
    def _backward(self) -> tuple[Ints, Ints]:
        return self.table.first_by_key(*BACKWARDS), self.table.last_by_key(*BACKWARDS)

    @cached_property
    def _last_added(self) -> Ints:
        """The last row that adds to each stage's gradients in each update; shape [stages, updates]."""
        table = self.table
        rows = table.rows_with(*ADDING)
        shape = table.num_stages, table.num_updates
        keys = table.stage[rows] * shape[1] + table.update[rows]
        return last_row_per(keys, rows, shape[0] * shape[1]).reshape(shape)

    def _neighbour_keys(self, neighbours: Ints) -> Ints:
        """For each key, the key of the same micro-batch at the neighbouring stage, -1 where there is none."""
        microbatch = np.arange(self.table.num_microbatches)
        stage = neighbours[microbatch % len(neighbours)].T
        keys: Ints = np.where(stage < 0, -1, stage * self.table.num_microbatches + microbatch).ravel()
        return keys

    @cached_property
    def messages(self) -> Messages:
        """Every message between ranks: activations to the next stage, gradients to the previous one."""
        table, header = self.table, self.table.header
        send, receive, use = [], [], []
        for sending, receiving, neighbours, first in (
            (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, header.following_stages, self._forward[0]),
            (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, header.preceding_stages, self._backward[0]),
        ):
            rows = table.rows_with(sending)
            target = self._neighbour_keys(neighbours)[table.key[rows]]
            send.append(rows)
            receive.append(table.last_by_key(receiving)[target])
            use.append(first[target])
        return Messages(np.concatenate(send), np.concatenate(receive), np.concatenate(use))

    @cached_property
    def gathers(self) -> Needs:
        """Every use of sharded weights needs the latest gather of its unit; none where weights are whole."""
        table = self.table
        rows = table.rows_with(*USES, Kind.GATHER_WEIGHTS) if table.header.weight_buffers else np.empty(0, np.int64)
        rows = rows[of_sharded_weights(table, rows)]
        rows = rows[np.lexsort((rows, places(table, rows)))]
        gathering = table.is_kind(Kind.GATHER_WEIGHTS)[rows]
        latest = np.maximum.accumulate(np.where(gathering, np.arange(len(rows)), 0))
        return Needs(rows[~gathering], rows[latest[~gathering]])

    @cached_property
    def gradient_buffers(self) -> Needs:
        """Every backward that opens a unit's sharded gradient needs the reduction whose buffer it takes."""
        return Needs(*awaited_reductions(self.table)).where_known()

    @cached_property
    def reduced(self) -> Needs:
        """Of several updates in a step a rank's first row of each awaits all reductions of it there, as engines do."""
        table = self.table
        several = table.header.updates_per_step > 1
        rows = table.rows_with(Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED)[: None if several else 0]
        updates, place = table.rows_with(Kind.UPDATE), table.rank * table.num_updates + table.update
        first = first_row_per(place[updates], updates, table.header.num_ranks * table.num_updates)
        return Needs(first[place[rows]], rows).where_known()

    def local_needs(self) -> Iterator[Needs]:
        """Needs between rows of one rank, by kind of need."""
        yield from self._transfer_needs()
        yield from self._hand_over_needs()
        yield from self._unit_needs()
        yield from self._recompute_needs()
        yield from (self.reloads, *(Needs(*pair) for pair in move_needs(self.table)))
        if self.table.header.mode == "train":
            yield from self._reduction_needs()
            yield from self._version_needs()

    def _transfer_needs(self) -> Iterator[Needs]:
        """A send needs its output, and what reads a receive needs it posted."""
        table = self.table
        for kind, (_, last) in ((Kind.SEND_ACTIVATION, self._forward), (Kind.SEND_GRADIENT, self._backward)):
            rows = table.rows_with(kind)
            yield Needs(rows, last[table.key[rows]])
        for kind, (first, _) in ((Kind.RECV_ACTIVATION, self._forward), (Kind.RECV_GRADIENT, self._backward)):
            rows = table.rows_with(kind)
            yield Needs(first[table.key[rows]], rows)

    def _hand_over_needs(self) -> Iterator[Needs]:
        """Stages that follow one another on one rank, a backward its forward, the first backward its token counts."""
        header = self.table.header
        (first_forward, last_forward), (first_backward, last_backward) = self._forward, self._backward
        yield self._same_rank(first_forward, last_forward, self._neighbour_keys(header.preceding_stages))
        yield Needs(first_backward, last_forward).where_known()
        following = self._neighbour_keys(header.following_stages)
        yield self._same_rank(first_backward, last_backward, following)
        starts = np.flatnonzero((following < 0) & (first_backward >= 0))
        step = starts % self.table.num_microbatches // header.num_microbatches
        rank = header.stage_ranks[starts // self.table.num_microbatches]
        yield Needs(
            first_backward[starts], self._collective_rows(Kind.REDUCE_COUNTS, header.num_microbatches)[rank, step]
        )

    def _same_rank(self, first: Ints, last: Ints, neighbour: Ints) -> Needs:
        needs = Needs(first, np.where(neighbour < 0, -1, last[neighbour])).where_known()
        same = self.table.rank[needs.row] == self.table.rank[needs.needed]
        return Needs(needs.row[same], needs.needed[same])

    def _unit_needs(self) -> Iterator[Needs]:
        """Units of a chunk forward in ascending, backward in descending order; a weight half needs its input half."""
        table = self.table
        for kind, sign in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1), (Kind.BACKWARD_INPUT, -1)):
            rows = np.flatnonzero(table.is_kind(kind) & (table.unit >= 0))
            rows = rows[np.lexsort((sign * table.unit[rows], table.key[rows]))]
            same = table.key[rows[1:]] == table.key[rows[:-1]]
            yield Needs(rows[1:][same], rows[:-1][same])
        halves = []
        for kind in (Kind.BACKWARD_WEIGHT, Kind.BACKWARD_INPUT):
            rows = table.rows_with(kind)
            halves.append(rows[np.lexsort((table.unit[rows], table.key[rows]))])
        yield Needs(*halves)

    def _recompute_needs(self) -> Iterator[Needs]:
        """What runs again needs its forward, and its backward needs it."""
        table = self.table
        again = table.rows_with(Kind.RECOMPUTE)
        most = max(table.header.units_per_stage) + 1
        place = table.key * most + table.unit + 1
        again = again[np.argsort(place[again])]
        for kinds in ((Kind.FORWARD,), BACKWARDS):
            rows = table.rows_with(*kinds)
            rows = rows[np.isin(place[rows], place[again])]
            rows = rows[np.argsort(place[rows])]
            yield Needs(again, rows) if kinds == (Kind.FORWARD,) else Needs(rows, again)

    @cached_property
    def reloads(self) -> Needs:
        """Backwards need the reload of their activations, and updates need that of their state."""
        return Needs(*reload_needs(self.table, BACKWARDS))

    def _reduction_needs(self) -> Iterator[Needs]:
        """Reductions need the last gradient they include, scalars every one of their step, updates the scalars.

        Where a step has several updates they do not wait for its scalars, which then tell of losses and the last
        update's gradients.
        """
        table, header = self.table, self.table.header
        last = self._last_added
        reductions = table.rows_with(Kind.REDUCE_GRADIENTS)
        adding = table.rows_with(*ADDING)
        # Of whole chunks any unit's gradient needs the last row; of refined ones its own unit's.
        most_units = max(header.units_per_stage)
        place = (table.stage * table.num_updates + table.update) * most_units
        own = adding[table.unit[adding] >= 0]
        whole = adding[table.unit[adding] < 0]
        by_unit = last_row_per((place + table.unit)[own], own, table.num_stages * table.num_updates * most_units)
        by_stage = last_row_per((place // most_units)[whole], whole, table.num_stages * table.num_updates)
        whole_ones = reductions[~of_sharded_gradients(table, reductions)]
        yield Needs(whole_ones, by_unit[(place + table.unit)[whole_ones]]).where_known()
        yield Needs(reductions, by_stage[(place // most_units)[reductions]]).where_known()
        tied = table.rows_with(Kind.REDUCE_TIED)
        for stage, uses in local_uses(self.table.header).items():
            rows = tied[table.stage[tied] == stage]
            for group, stages in uses.items():
                mine = rows[table.unit[rows] == header.units_per_stage[stage] + group]
                for use in stages:
                    yield Needs(mine, last[use, table.update[mine]])
        updates = table.rows_with(Kind.UPDATE)
        scalars = self._collective_rows(Kind.REDUCE_SCALARS, header.num_microbatches)
        every = header.updates_per_step
        for stage, rank in enumerate(header.stage_ranks.tolist()):
            yield Needs(scalars[rank], last[stage, every - 1 :: every])
        for rows in (reductions, tied):
            closing = rows[(table.update[rows] + 1) % every == 0]
            yield Needs(scalars[table.rank[closing], table.update[closing] // every], closing)
        if every > 1:
            yield Needs(updates, last[table.stage[updates], table.update[updates]])
            yield self._updates_after_reductions(updates)
            return
        yield Needs(updates, scalars[table.rank[updates], table.update[updates]])

    def _updates_after_reductions(self, updates: Ints) -> Needs:
        """Of several in a step an update needs its own unit's reduction."""
        table = self.table
        rows = table.rows_with(Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED)
        most = max(table.header.units_per_stage) + len(table.header.tied_groups)
        place = (table.stage * table.num_updates + table.update) * most + table.unit
        found = last_row_per(place[rows], rows, table.num_stages * table.num_updates * most)
        return Needs(updates, found[place[updates]]).where_known()

    def _version_needs(self) -> Iterator[Needs]:
        """A forward or gather needs the update that wrote its version, a gradient buffer that its update is done."""
        table, header = self.table, self.table.header
        updates = table.rows_with(Kind.UPDATE)
        for kinds, delays in (
            ((Kind.FORWARD, Kind.GATHER_WEIGHTS), header.versions_per_stage),
            (ADDING, (header.gradient_buffers,) * table.num_stages),
        ):
            rows = table.rows_with(*kinds)
            keys = table.stage[rows] * table.num_updates + table.update[rows]
            first = first_row_per(keys, rows, table.num_stages * table.num_updates)
            first = first.reshape(table.num_stages, table.num_updates)
            for stage, users in readers_of_state(self.table.header).items():
                mine = updates[table.stage[updates] == stage]
                later = table.update[mine] + delays[stage]
                inside = later < table.num_updates
                for reader in users:
                    yield Needs(first[reader, later[inside]], mine[inside]).where_known()

    def _collective_rows(self, kind: Kind, every: int) -> Ints:
        """The row of a whole-pipeline collective for each rank and step or update; shape [ranks, count]."""
        table = self.table
        count = table.num_microbatches // every
        found = np.full((table.header.num_ranks, count), -1, dtype=np.int64)
        rows = table.rows_with(kind)
        found[table.rank[rows], table.microbatch[rows] // every] = rows
        return found

    def collective_needs(self) -> Needs:
        """Rows that need a collective's result, against the start of that collective on each rank that takes part.

        Scalars start without waiting, but their sum needs the tied gradients of every group, and so do updates.
        """
        table, header = self.table, self.table.header
        counts = self._collective_rows(Kind.REDUCE_COUNTS, header.num_microbatches)
        parts = [_against_all(self._counts_users(), counts)]
        if header.updates_per_step == 1:
            updates, tied = table.rows_with(Kind.UPDATE), table.rows_with(Kind.REDUCE_TIED)
            scalars = self._collective_rows(Kind.REDUCE_SCALARS, header.num_microbatches)
            place = table.rank[updates] * table.num_updates + table.update[updates]
            first_update = first_row_per(place, updates, scalars.size).reshape(scalars.shape)
            parts.append(_against_all(first_update, scalars))
            parts.append(Needs(first_update[:, table.update[tied]].ravel(), np.tile(tied, header.num_ranks)))
        both = Needs(np.concatenate([part.row for part in parts]), np.concatenate([part.needed for part in parts]))
        return both.where_known()

    def _counts_users(self) -> Ints:
        """The first backward of a route's last stage in each rank and step, -1 where none; shape [ranks, steps]."""
        table, header = self.table, self.table.header
        ends = np.flatnonzero(self._neighbour_keys(header.following_stages) < 0)
        rows = np.sort(self._backward[0][ends])
        rows = rows[rows >= 0]
        place = table.rank[rows] * table.steps + table.microbatch[rows] // header.num_microbatches
        return first_row_per(place, rows, header.num_ranks * table.steps).reshape(header.num_ranks, table.steps)


def _against_all(users: Ints, members: Ints) -> Needs:
    """Each rank's user of a collective (shape [ranks, count]) needs every rank's member of it (same shape)."""
    ranks = len(users)
    return Needs(np.repeat(users, ranks, axis=0).ravel(), np.tile(members, (ranks, 1)).ravel())
