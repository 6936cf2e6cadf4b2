"""Does the first step get through where the first use of a link or group is a rendezvous?

NCCL connects two ranks when they first send or receive on a communicator, one direction at a time, and the members of
a group in their first collective. The call does not return, on any member's host, until every member has made it. So
a rank that posts an early receive does not go on to the send that the other side waits for.
"""

from collections.abc import Collection
from typing import Final

import numpy as np

from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import Connection
from megapipe.schedules.table import Table
from megapipe.schedules.tokens import describe
from megapipe.schedules.validation.failure import action_at

_SENDERS: Final = {Kind.SEND_ACTIVATION: "following", Kind.SEND_GRADIENT: "preceding"}
_RECEIVERS: Final = {Kind.RECV_ACTIVATION: "preceding", Kind.RECV_GRADIENT: "following"}
_Meeting = Connection | frozenset[int]
"""A link, or the ranks of a group that reduces."""


def first_use_deadlock(table: Table, connected: Collection[Connection]) -> str:
    """Return which ranks wait for one another in the first uses of links and groups; "" where all get through.

    Args:
        table: a lowered schedule, unrolled.
        connected: links that all ranks connect at start, one after the other in this order.
    """
    header = table.header
    ranks = [place.rank for place in header.stages]
    members: dict[_Meeting, Collection[int]] = {}
    programs: list[list[tuple[_Meeting, Action | None]]] = [[] for _ in range(header.num_ranks)]
    for connection in connected:
        for rank in (ranks[stage] for stage in connection):
            programs[rank].append((connection, None))
    met: set[tuple[int, _Meeting]] = {(rank, meeting) for rank, each in enumerate(programs) for meeting, _ in each}
    for row in _candidates(table):
        meeting, rank = _meeting(table, row), int(table.rank[row])
        if len(meeting) > 1 and (rank, meeting) not in met:
            met.add((rank, meeting))
            programs[rank].append((meeting, action_at(table, row)))
    for program in programs:
        for meeting, _ in program:
            own = meeting if isinstance(meeting, frozenset) else {ranks[stage] for stage in meeting}
            members.setdefault(meeting, own)
    return _stuck(programs, members)


def _candidates(table: Table) -> list[int]:
    """The first row of every rank, kind, stage, unit and route: among them are all first uses, in program order."""
    rows = table.rows_with(
        *_SENDERS, *_RECEIVERS, Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS, Kind.REDUCE_TIED
    )  # fmt: skip
    route = table.microbatch[rows] % len(table.header.routes)
    places = np.stack([table.rank[rows], table.kind[rows], table.stage[rows], table.unit[rows], route])
    _, first = np.unique(places, axis=1, return_index=True)
    found: list[int] = np.sort(rows[first]).tolist()
    return found


def _meeting(table: Table, row: int) -> _Meeting:
    header = table.header
    kind, stage = Kind(int(table.kind[row])), int(table.stage[row])
    if kind in (Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS):
        return frozenset(range(header.num_ranks))
    if kind == Kind.REDUCE_TIED:
        group = int(table.unit[row]) - header.units_per_stage[stage]
        return frozenset(header.stages[other].rank for other in header.tied_groups[group])
    neighbours = {"following": header.following_stages, "preceding": header.preceding_stages}
    route = int(table.microbatch[row]) % len(header.routes)
    other = int(neighbours[_SENDERS.get(kind) or _RECEIVERS[kind]][route, stage])
    return (stage, other) if kind in _SENDERS else (other, stage)


def _stuck(programs: list[list[tuple[_Meeting, Action | None]]], members: dict[_Meeting, Collection[int]]) -> str:
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        waiting: dict[_Meeting, set[int]] = {}
        for rank, program in enumerate(programs):
            if at[rank] < len(program):
                waiting.setdefault(program[at[rank]][0], set()).add(rank)
        for meeting, present in waiting.items():
            if present == set(members[meeting]):
                moved = True
                for rank in present:
                    at[rank] += 1
    hanging = []
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            action = program[at[rank]][1]
            hanging.append(f"rank {rank} at {'its start' if action is None else describe(action)}")
    return "; ".join(hanging)
