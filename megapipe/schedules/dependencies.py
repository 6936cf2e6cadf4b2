"""The actions that every action waits for, derived from the kinds. Validator and simulator read this table.

Needs within one rank are settled by program order; needs across ranks by messages and collectives, which ranks wait
for. All functions expect a table whose rows are well formed and complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import ADDING, BACKWARDS, Ints, Kind, Mask
from megapipe.schedules.gathers import USES, awaited_reductions, by_place, num_places, of_states
from megapipe.schedules.memory import activations_moved, state_places, states_moved, unit_places
from megapipe.schedules.schedule import Connection, Header
from megapipe.schedules.table import Table, first_row_per, last_row_per

MOST_SWEEPS_BETWEEN_CHECKS: Final = 32
"""Maximum number of sweeps between two checks whether any rank still advances."""


class Progress:
    """Ranks that pass their rows in order. A rank passes a row after the row for which it waits has been passed.

    ``row[i]`` waits for ``needed[i]``; both index one table, rank by rank, whose first rows per rank are ``offsets``
    (shape [ranks + 1]). A row may have several waits. All ranks advance together, one wait per sweep, as columns:
    the cost grows with the longest chain of waits, not with the number of ranks.
    """

    def __init__(self, row: Ints, needed: Ints, offsets: Ints) -> None:
        num_ranks = len(offsets) - 1
        self._order = np.argsort(row, kind="stable")
        self._place = np.empty(len(row), dtype=np.int64)
        ends = np.searchsorted(row[self._order], offsets[1:])
        firsts = np.searchsorted(row[self._order], offsets[:-1])
        # A rank that has passed all of its rows hangs in an extra wait after the last one, which is never met.
        through = np.arange(num_ranks)
        self._row = np.insert(row[self._order], ends, offsets[1:])
        self._needed = np.insert(needed[self._order], ends, np.iinfo(np.int64).max)
        self._needed_rank = np.searchsorted(offsets, self._needed, side="right") - 1
        self._needed_rank = np.minimum(self._needed_rank, num_ranks - 1)
        self._pointer, self._ends, self._through = firsts + through, ends + through, through
        shift = np.searchsorted(offsets, row[self._order], side="right") - 1
        self._place[self._order] = np.arange(len(row)) + shift

    def stuck(self) -> Ints:
        """Advance as far as possible, and return the wait in which each stuck rank hangs; empty when all are
        through."""
        row, needed, ranks, pointer = self._row, self._needed, self._needed_rank, self._pointer
        sweeps, before = 1, -1
        while before != (before := int(pointer.sum())):
            for _ in range(sweeps):
                pointer += row.take(pointer).take(ranks.take(pointer)) > needed.take(pointer)
            sweeps = min(2 * sweeps, MOST_SWEEPS_BETWEEN_CHECKS)
        stuck = pointer < self._ends
        hanging: Ints = self._order[(pointer - self._through)[stuck]]
        return hanging

    def release(self, waits: Ints) -> None:
        """Count the waits as met from now on, and advance the ranks that hang there and those that wait for them."""
        places = self._place[waits].tolist()
        self._needed[places] = -1
        row, needed, needed_rank = self._lists
        for place in places:
            needed[place] = -1
        pointer = self._pointer.tolist()
        moving = [rank for rank, at in enumerate(pointer) if at in places]
        while moving:
            rank = moving.pop()
            before = pointer[rank]
            while row[pointer[needed_rank[pointer[rank]]]] > needed[pointer[rank]]:
                pointer[rank] += 1
            if pointer[rank] > before:
                moving += [each for each, at in enumerate(pointer) if needed_rank[at] == rank]
        self._pointer[:] = pointer

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        return self._row.tolist(), self._needed.tolist(), self._needed_rank.tolist()


class Needs(NamedTuple):
    """``row[i]`` needs ``needed[i]`` done first."""

    row: Ints
    needed: Ints

    def where_known(self) -> "Needs":
        """Return the entries that have both rows; -1 marks a row that does not exist."""
        return self.where((self.row >= 0) & (self.needed >= 0))

    def where(self, chosen: Mask | Ints) -> "Needs":
        """Return the chosen entries, by a mask or by their indices."""
        return Needs(self.row[chosen], self.needed[chosen])


NO_NEEDS = Needs(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def joined(*parts: Needs) -> Needs:
    """Return the needs of all parts."""
    return Needs(*map(np.concatenate, zip(NO_NEEDS, *parts, strict=True)))


def matched(rows: Ints, needed: Ints, places: Ints) -> Needs:
    """Return the rows that have a needed row of the same place, each with this row."""
    if len(needed) == 0:
        return NO_NEEDS
    order = np.argsort(places[needed], kind="stable")
    wanted = places[needed][order]
    index = np.minimum(np.searchsorted(wanted, places[rows]), len(needed) - 1)
    has_match = wanted[index] == places[rows]
    return Needs(rows[has_match], needed[order][index[has_match]])


def awaited_rows(row: Ints, needed: Ints) -> dict[int, list[int]]:
    """Return the other rows that each row needs, by its index; rows that need none are left out."""
    awaited: dict[int, list[int]] = {}
    for index, other in zip(row.tolist(), needed.tolist(), strict=True):
        if index != other:
            awaited.setdefault(index, []).append(other)
    return awaited


@dataclass(frozen=True)
class Messages:
    """One entry per message: the row that sends it, the row that receives it, and the first row that reads it."""

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

    @property
    def _first_backwards(self) -> Ints:
        """The first backward of each micro-batch on the last stage of its route, by stage, then by micro-batch."""
        rows = self._backward[0][self._neighbour_keys(self.table.header.following_stages) < 0]
        return rows[rows >= 0]

    def _neighbour_keys(self, neighbours: Ints) -> Ints:
        """Return for each key, the key of the same micro-batch at the neighbouring stage, -1 where there is none."""
        microbatch = np.arange(self.table.num_microbatches)
        stage = neighbours[microbatch % len(neighbours)].T
        return np.where(stage < 0, -1, stage * len(microbatch) + microbatch).ravel()

    @cached_property
    def messages(self) -> Messages:
        """Every message between ranks: activations to the next stage, gradients to the previous one."""
        table, header, parts = self.table, self.table.header, []
        for sending, receiving, neighbours, first in (
            (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, header.following_stages, self._forward[0]),
            (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, header.preceding_stages, self._backward[0]),
        ):
            rows = table.rows_with(sending)
            target = self._neighbour_keys(neighbours)[table.key[rows]]
            parts.append((rows, table.last_by_key(receiving)[target], first[target]))
        return Messages(*map(np.concatenate, zip(*parts, strict=True)))

    @cached_property
    def link(self) -> Ints:
        """One number for the sending and the receiving rank of each message."""
        rank, messages = self.table.rank, self.messages
        return rank[messages.send] * self.table.header.num_ranks + rank[messages.receive]

    @cached_property
    def gathers(self) -> Needs:
        """Every use of sharded weights needs the latest gather of its unit; none where weights are whole."""
        table = self.table
        if not table.header.gathered_weights.any():
            return NO_NEEDS
        using = table.rows_with(*USES, Kind.GATHER_WEIGHTS)
        rows = by_place(table, using, table.header.gathered_weights)[0].row
        gathering = table.is_kind(Kind.GATHER_WEIGHTS)[rows]
        latest = np.maximum.accumulate(np.where(gathering, np.arange(len(rows)), 0))
        return Needs(rows[~gathering], rows[latest[~gathering]])

    @cached_property
    def gradient_buffers(self) -> Needs:
        """Every backward that opens a unit's sharded gradient needs the reduction that makes room for it."""
        if not self.table.header.sharded_gradients.any():
            return NO_NEEDS
        return Needs(*awaited_reductions(self.table)).where_known()

    @cached_property
    def reduced(self) -> Needs:
        """If a step has several updates, let the first update row of a rank wait for all reductions of that update on
        the rank, as the engine does."""
        table = self.table
        if table.header.updates_per_step == 1:
            return NO_NEEDS
        rows = table.rows_with(Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED)
        first_updates = table.first_by_update(table.rows_with(Kind.UPDATE))
        return Needs(first_updates[table.rank[rows], table.update[rows]], rows).where_known()

    def local_needs(self) -> Iterator[Needs]:
        """Yield needs between rows of one rank, by kind of need."""
        yield from self._transfer_needs()
        yield from self.compute_needs()
        yield self._counts_needs()
        yield from self._recompute_needs()
        yield from (self.reloads, self.snapshots, *self._move_needs())
        if self.table.header.mode == "train":
            yield from self._reduction_needs()
            yield from self._version_needs()

    def _transfer_needs(self) -> Iterator[Needs]:
        """A send needs the action that makes its tensor; the action that reads a received tensor needs the posted
        receive."""
        table = self.table
        for kind, (_, last) in ((Kind.SEND_ACTIVATION, self._forward), (Kind.SEND_GRADIENT, self._backward)):
            rows = table.rows_with(kind)
            yield Needs(rows, last[table.key[rows]])
        for kind, (first, _) in ((Kind.RECV_ACTIVATION, self._forward), (Kind.RECV_GRADIENT, self._backward)):
            rows = table.rows_with(kind)
            yield Needs(first[table.key[rows]], rows)

    def compute_needs(self) -> Iterator[Needs]:
        """Yield needs between compute actions of one rank: of neighbouring stages, of a backward and its forward, of
        units."""
        yield self.hand_overs(same_rank=True)
        yield Needs(self._backward[0], self._forward[1]).where_known()
        yield from self._slice_needs()
        yield from self._unit_needs()

    def hand_overs(self, *, same_rank: bool) -> Needs:
        """Return needs between stages of one rank, or of different ranks, shards of the vocabulary included."""
        needs = joined(self.shard_needs, self.route_needs)
        return needs.where((self.table.rank[needs.row] == self.table.rank[needs.needed]) == same_rank)

    @cached_property
    def route_needs(self) -> Needs:
        """Needs along the routes: a forward needs the forward of the preceding stage, a backward needs the backward of
        the following one."""
        header, parts = self.table.header, []
        for (first, last), neighbours in (
            (self._forward, header.preceding_stages),
            (self._backward, header.following_stages),
        ):
            neighbour = self._neighbour_keys(neighbours)
            parts.append(Needs(first, np.where(neighbour < 0, -1, last[neighbour])))
        return joined(*parts).where_known()

    def sent(self) -> Needs:
        """Return the needs along the routes that a message meets, in the order of the rows that send."""
        needs = self.route_needs
        apart = needs.where(self.table.rank[needs.row] != self.table.rank[needs.needed])
        return apart.where(np.argsort(apart.needed))

    @cached_property
    def shard_needs(self) -> Needs:
        """Needs if the vocabulary is sharded over all ranks. Output layer: the forward of a shard needs the forward of
        the route's last stage; the backward (or input half) of a shard needs the forwards of all shards; the last
        stage's backward needs the backwards of all shards. Each forward of a shard needs the pass before it on all
        ranks, which is the same pass. Input embedding: the forward of the route's first stage needs the forwards of
        all shards, whose backwards need the first stage's backward."""
        table, header = self.table, self.table.header
        shards, inputs = (np.array(each, dtype=np.int64) for each in (header.outputs, header.inputs))
        if not len(shards):
            return NO_NEEDS
        first, last = header.routes[0][0], header.routes[0][-1]
        shape = table.num_stages, table.num_microbatches
        forward, forwarded = (each.reshape(shape) for each in self._forward)
        backward, done = (each.reshape(shape) for each in self._backward)
        parts = [(forward[shards], forwarded[last])]
        for shard in shards.tolist():
            parts += [(backward[shards], forwarded[shard]), (backward[last], done[shard])]
        for shard in inputs.tolist():
            parts += [(forward[first], forwarded[shard]), (backward[shard], done[first])]
        passes = shard_passes(table)
        by_rank = np.stack(passes) if len({*map(len, passes)}) == 1 else forward[shards, :0]
        later = by_rank[:, 1:]
        opens = (table.kind[later] == Kind.FORWARD) & (table.stage[later] < inputs[0])
        after = np.where(opens, later, -1)
        parts += [(after, other[:-1]) for other in by_rank]
        pairs = (np.broadcast_arrays(*part) for part in parts)
        return joined(*(Needs(*map(np.ravel, pair)) for pair in pairs)).where_known()

    def _slice_needs(self) -> Iterator[Needs]:
        """On each stage a slice's forward needs that of the slice before it, whose keys and values it reads; its
        backward needs that of the slice after it, which adds to the gradients of its keys and values."""
        slices = self.table.header.slices
        later = np.arange(self.table.num_stages * self.table.num_microbatches)
        later = later[later % slices > 0]
        for (first, last), shift in ((self._forward, 0), (self._backward, 1)):
            yield Needs(first[later - shift], last[later - 1 + shift]).where_known()

    def _counts_needs(self) -> Needs:
        """The first backward of a micro-batch needs the token counts of its step."""
        table, rows = self.table, self._first_backwards
        return Needs(rows, self._collective_rows(Kind.REDUCE_COUNTS)[table.rank[rows], table.step[rows]])

    def _unit_needs(self) -> Iterator[Needs]:
        """Units of a chunk forward in ascending, backward in descending order; a weight half needs its input half."""
        table = self.table
        for kind, sign in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1), (Kind.BACKWARD_INPUT, -1)):
            rows = np.flatnonzero(table.is_kind(kind) & (table.unit >= 0))
            rows = rows[np.lexsort((sign * table.unit[rows], table.key[rows]))]
            same = table.key[rows[1:]] == table.key[rows[:-1]]
            yield Needs(rows[1:][same], rows[:-1][same])
        weights, place = table.rows_with(Kind.BACKWARD_WEIGHT), unit_places(table)
        yield matched(weights[np.argsort(place[weights])], table.rows_with(Kind.BACKWARD_INPUT), place)

    def _recompute_needs(self) -> Iterator[Needs]:
        """Let a recomputed forward wait for its forward, and its backward wait for the recomputed one."""
        table, place = self.table, unit_places(self.table)
        recomputed = table.rows_with(Kind.RECOMPUTE)
        backwards = table.rows_with(*BACKWARDS)
        yield matched(recomputed[np.argsort(place[recomputed])], table.rows_with(Kind.FORWARD), place)
        yield matched(backwards[np.argsort(place[backwards])], recomputed, place)

    @cached_property
    def reloads(self) -> Needs:
        """Backwards need the reload of their activations, and updates need that of their state."""
        table = self.table
        return joined(
            matched(table.rows_with(*BACKWARDS), activations_moved(table, Kind.RELOAD), unit_places(table)),
            matched(table.rows_with(Kind.UPDATE), states_moved(table, Kind.RELOAD), state_places(table)),
        )

    @cached_property
    def snapshots(self) -> Needs:
        """Updates need the copy of the state that they replace, if it is copied for a checkpoint."""
        table = self.table
        return matched(table.rows_with(Kind.UPDATE), table.rows_with(Kind.SNAPSHOT), state_places(table))

    def _move_needs(self) -> Iterator[Needs]:
        """Activations leave after their forward, state after its update, and a reload comes after its offload."""
        table = self.table
        if len(table.rows_with(Kind.OFFLOAD, Kind.RELOAD)) == 0:
            return
        places, states = unit_places(table), state_places(table)
        out, back = (activations_moved(table, kind) for kind in (Kind.OFFLOAD, Kind.RELOAD))
        yield matched(out, table.rows_with(Kind.FORWARD), places)
        yield matched(back, out, places)
        out, back = states_moved(table, Kind.OFFLOAD), states_moved(table, Kind.RELOAD)
        yield matched(out, table.rows_with(Kind.UPDATE), states)
        # By unit, then by update. Each reload of a unit but the first needs the offload of the update before it.
        out, back = (
            rows[np.lexsort((table.update[rows], table.unit[rows], table.stage[rows]))] for rows in (out, back)
        )
        later = np.diff(table.update[back]) > 0
        yield Needs(back[1:][later], out[:-1][later])

    def _reduction_needs(self) -> Iterator[Needs]:
        """Reductions need the last gradient they include, scalars need all of their step, updates need the scalars.

        If a step has several updates, they do not wait for its scalars, which then describe the losses and the last
        update's gradients.
        """
        table, header = self.table, self.table.header
        last = table.last_added
        reductions = table.rows_with(Kind.REDUCE_GRADIENTS)
        adding = table.rows_with(*ADDING)
        # If a chunk is whole, each unit's reduction needs the chunk's last row; if it is cut into units, the row of
        # its own layer.
        cut = table.unit[adding] >= 0
        added_states = of_states(table, adding[cut], ~header.sharded_gradients)
        by_unit = last_row_per(added_states.places(table), added_states.row, num_places(table))
        unsharded = of_states(table, reductions, ~header.sharded_gradients)
        yield Needs(unsharded.row, by_unit[unsharded.places(table)]).where_known()
        whole, place = adding[~cut], table.stage_update
        by_stage = last_row_per(place[whole], whole, table.num_stages * table.num_updates)
        yield Needs(reductions, by_stage[place[reductions]]).where_known()
        tied = table.rows_with(Kind.REDUCE_TIED)
        for stage, uses in _local_uses(self.table.header).items():
            rows = tied[table.stage[tied] == stage]
            for group, stages in uses.items():
                mine = rows[table.unit[rows] == header.tied_unit(stage, group)]
                for use in stages:
                    yield Needs(mine, last[use, table.update[mine]])
        updates = table.rows_with(Kind.UPDATE)
        scalars = self._collective_rows(Kind.REDUCE_SCALARS)
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
        """Let each update wait for the reduction of its own unit, if a step has several updates."""
        rows, place = self.table.rows_with(Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED), state_places(self.table)
        last_reduction = last_row_per(place[rows], rows, int(place.max()) + 1)
        return Needs(updates, last_reduction[place[updates]]).where_known()

    def _version_needs(self) -> Iterator[Needs]:
        """A forward or gather needs the update that wrote its version. The first backward that adds to a gradient
        buffer needs the previous update from this buffer."""
        table, header = self.table, self.table.header
        updates = table.rows_with(Kind.UPDATE)
        for kinds, delays in (
            ((Kind.FORWARD, Kind.GATHER_WEIGHTS), header.versions_per_stage),
            (ADDING, (header.gradient_buffers,) * table.num_stages),
        ):
            rows = table.rows_with(*kinds)
            first = first_row_per(table.stage_update[rows], rows, table.num_stages * table.num_updates)
            first = first.reshape(table.num_stages, table.num_updates)
            for stage, users in _readers_of_state(self.table.header).items():
                mine = updates[table.stage[updates] == stage]
                later = table.update[mine] + delays[stage]
                inside = later < table.num_updates
                for reader in users:
                    yield Needs(first[reader, later[inside]], mine[inside]).where_known()

    def _collective_rows(self, kind: Kind) -> Ints:
        """Return the row of a whole-pipeline collective for each rank and step; shape [ranks, steps]."""
        return self.table.first_by_step(self.table.rows_with(kind))

    def collective_needs(self) -> Needs:
        """Return the rows that need a collective's result, each with the starts of the collective on all ranks that
        take part.

        Scalars start without waiting. But their sum needs the sums of tied gradients, and the sums of gradients over
        all holders of a part; updates need these sums, too.
        """
        table, header = self.table, self.table.header
        first_users = table.first_by_step(np.sort(self._first_backwards))
        counts = self._collective_rows(Kind.REDUCE_COUNTS)
        parts = [against_all(first_users, counts), self.shard_needs]
        if header.updates_per_step == 1:
            tied = np.concatenate([table.rows_with(Kind.REDUCE_TIED), table.shared_reductions])
            updates = table.first_by_update(table.rows_with(Kind.UPDATE))
            parts.append(against_all(updates, self._collective_rows(Kind.REDUCE_SCALARS)))
            parts.append(Needs(updates[:, table.update[tied]].ravel(), np.tile(tied, len(updates))))
        return joined(*parts).where_known()

    def waits(self) -> Needs:
        """Return the rows that wait for rows of other ranks, or of other streams of their rank, to end."""
        arrivals = Needs(self.messages.use, self.messages.send)
        copies, collectives = joined(self.reloads, self.snapshots), self.collective_needs()
        return joined(arrivals, self.gathers, self.gradient_buffers, self.reduced, copies, collectives)

    def link_of_sends(self) -> dict[int, Connection]:
        """Return the ranks that each send connects, by its row."""
        messages, rank = self.messages, self.table.rank
        links = zip(rank[messages.send].tolist(), rank[messages.receive].tolist(), strict=True)
        return dict(zip(messages.send.tolist(), links, strict=True))


def shard_passes(table: Table) -> list[Ints]:
    """Return for each rank the passes of its shards of the vocabulary that have collectives, in program order; empty
    if there are none."""
    rows = np.flatnonzero(table.header.is_shard[table.stage] & table.is_kind(Kind.FORWARD, *BACKWARDS))
    return [rows[table.rank[rows] == rank] for rank in range(table.header.num_ranks)] if len(rows) else []


def against_all(users: Ints, members: Ints) -> Needs:
    """Each rank's user of a collective (shape [ranks, count]) needs every rank's member of it (same shape)."""
    ranks = len(users)
    return Needs(np.repeat(users, ranks, axis=0).ravel(), np.tile(members, (ranks, 1)).ravel())


def _local_uses(header: Header) -> dict[int, dict[int, tuple[int, ...]]]:
    """Return, by owning stage and tied group, the stages of its rank that use the tied weight."""
    uses: dict[int, dict[int, tuple[int, ...]]] = {}
    for group, stages in enumerate(header.tied_groups):
        for owner in header.tied_owners(group):
            local = (stage for stage in stages if header.stages[stage].rank == header.stages[owner].rank)
            uses.setdefault(owner, {})[group] = tuple(sorted(set(local)))
    return uses


def _readers_of_state(header: Header) -> dict[int, set[int]]:
    """Return, for each stage that keeps state, the stages of its rank whose compute uses any of it."""
    readers = {stage: {stage} for stage in range(len(header.stages))}
    for owner, uses in _local_uses(header).items():
        readers[owner].update(stage for stages in uses.values() for stage in stages)
    return readers
