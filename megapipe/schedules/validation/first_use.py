"""Check that the first step cannot deadlock if the first use of a link or group blocks the host.

NCCL connects two ranks when they first send or receive on a communicator, one direction at a time, and the members of
a group in their first collective. The call blocks the host of every member until all members have made it. So a rank
that posts an early receive does not reach the send that the other side waits for.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from megapipe.schedules.actions import Action, Ints, Kind, describe
from megapipe.schedules.schedule import Connection, Header
from megapipe.schedules.table import Table, first_row_per
from megapipe.schedules.validation.failure import action_at

_SENDERS: Final = {Kind.SEND_ACTIVATION: "following", Kind.SEND_GRADIENT: "preceding"}
_RECEIVERS: Final = {Kind.RECV_ACTIVATION: "preceding", Kind.RECV_GRADIENT: "following"}
_Meeting = Connection | frozenset[int]
"""A link, or the ranks of a group with a reduction."""


@dataclass(frozen=True)
class FirstUses:
    """The first use of each link and group by each rank of a lowered schedule, in program order, with its action."""

    header: Header
    by_rank: list[list[tuple[_Meeting, Action]]]

    @classmethod
    def of(cls, table: Table) -> "FirstUses":
        """Return the first uses in an unrolled table."""
        uses: list[list[tuple[_Meeting, Action]]] = [[] for _ in range(table.header.num_ranks)]
        met: set[tuple[int, _Meeting]] = set()
        for row in _candidates(table):
            meeting, rank = _meeting(table, row), int(table.rank[row])
            if len(meeting) > 1 and (rank, meeting) not in met:
                met.add((rank, meeting))
                uses[rank].append((meeting, action_at(table, row)))
        return cls(table.header, uses)

    def deadlock(self, connected: Collection[Connection]) -> str:
        """Return where ranks deadlock, or an empty string if they do not.

        Args:
            connected: links that all ranks connect at the start, in this order.
        """
        programs: list[list[tuple[_Meeting, Action | None]]] = [[] for _ in self.by_rank]
        for connection in connected:
            for rank in connection:
                programs[rank].append((connection, None))
        known = set(connected)
        for program, uses in zip(programs, self.by_rank, strict=True):
            program += [(meeting, action) for meeting, action in uses if meeting not in known]
        return _stuck(programs)


def _candidates(table: Table) -> list[int]:
    """Return rows that include all first uses, in program order: the first of each kind, stage and route or unit."""
    routes, header = len(table.header.routes), table.header
    found: list[Ints] = []
    for kind in (*_SENDERS, *_RECEIVERS):
        rows = table.rows_with(kind)
        keys = table.stage[rows] * np.int64(routes) + table.microbatch[rows] % routes
        found.append(first_row_per(keys, rows, table.num_stages * routes))
    for kind in (Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS):
        rows = table.rows_with(kind)
        found.append(first_row_per(table.rank[rows], rows, header.num_ranks))
    rows = table.rows_with(Kind.REDUCE_TIED)
    units = header.most_states + len(header.tied_groups)
    found.append(first_row_per(table.stage[rows] * np.int64(units) + table.unit[rows], rows, table.num_stages * units))
    rows = table.shared_reductions
    found.append(first_row_per(table.stage[rows].astype(np.int64), rows, table.num_stages))
    every = np.concatenate(found)
    return sorted(every[every >= 0].tolist())


def _meeting(table: Table, row: int) -> _Meeting:
    header = table.header
    kind, stage = Kind(int(table.kind[row])), int(table.stage[row])
    if kind in (Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS):
        return frozenset(range(header.num_ranks))
    if kind in (Kind.REDUCE_TIED, Kind.REDUCE_GRADIENTS):
        return header.summing_ranks(stage, int(table.unit[row]))
    neighbours = {"following": header.following_stages, "preceding": header.preceding_stages}
    route = int(table.microbatch[row]) % len(header.routes)
    neighbour = int(neighbours[_SENDERS.get(kind) or _RECEIVERS[kind]][route, stage])
    rank, other = header.stages[stage].rank, header.stages[neighbour].rank
    return (rank, other) if kind in _SENDERS else (other, rank)


def _stuck(programs: list[list[tuple[_Meeting, Action | None]]]) -> str:
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        waiting: dict[_Meeting, set[int]] = {}
        for rank, program in enumerate(programs):
            if at[rank] < len(program):
                waiting.setdefault(program[at[rank]][0], set()).add(rank)
        for meeting, present in waiting.items():
            if present == set(meeting):
                moved = True
                for rank in present:
                    at[rank] += 1
    hanging = []
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            action = program[at[rank]][1]
            hanging.append(f"rank {rank} at {'its start' if action is None else describe(action)}")
    return "; ".join(hanging)
