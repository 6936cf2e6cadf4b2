"""Do messages meet? Same order at both ends of a link, collectives in one order, and nobody waits in a circle."""

import numpy as np

from megapipe.schedules.actions import Ints, Kind
from megapipe.schedules.dependencies import Dependencies, Needs
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.progress import Progress
from megapipe.schedules.table import Table
from megapipe.schedules.tokens import describe
from megapipe.schedules.validation.failure import action_at, failure, neighbourhood


def check_links(dependencies: Dependencies) -> None:
    """Raise ScheduleError if a link's receives are posted in another order than its sends."""
    table, messages = dependencies.table, dependencies.messages
    link = table.rank[messages.send] * table.header.num_ranks + table.rank[messages.receive]
    sent = np.lexsort((messages.send, link))
    received = np.lexsort((messages.receive, link))
    if not np.array_equal(sent, received):
        index = int(np.argmax(sent != received))
        send, receive = int(messages.send[sent[index]]), int(messages.receive[received[index]])
        problem = (
            f"rank {table.rank[send]} sends {describe(action_at(table, send))} on this link at this point; receives "
            "must be posted in the order of the sends"
        )
        raise failure(table, receive, problem)


def check_collectives(table: Table) -> None:
    """Raise ScheduleError where two ranks start the collectives of one group of ranks in different order."""
    header = table.header
    for kind in (Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS):
        rows = table.rows_with(kind)
        _check_same(table, [rows[table.rank[rows] == rank] for rank in range(header.num_ranks)], table.microbatch)
    tied = table.rows_with(Kind.REDUCE_TIED)
    if len(tied) == 0:
        return
    group = np.zeros(len(table.rows), dtype=np.int64)
    group[tied] = table.unit[tied] - np.array(header.units_per_stage)[table.stage[tied]]
    members = [frozenset(header.stages[stage].rank for stage in stages) for stages in header.tied_groups]
    for ranks in set(members):
        groups = [index for index, other in enumerate(members) if other == ranks]
        rows = tied[np.isin(group[tied], groups)]
        identity = group * table.num_microbatches + table.microbatch
        _check_same(table, [rows[table.rank[rows] == rank] for rank in sorted(ranks)], identity)


def _check_same(
    table: Table, members: list[Ints], identity: Ints | np.ndarray[tuple[int], np.dtype[np.int32]]
) -> None:
    for rows in members[1:]:
        differs = identity[rows] != identity[members[0]]
        if differs.any():
            index = int(np.argmax(differs))
            other = describe(action_at(table, int(members[0][index])))
            raise failure(
                table, int(rows[index]), f"rank {table.rank[members[0][index]]} starts {other} at this point"
            )


def check_progress(dependencies: Dependencies) -> None:
    """Raise ScheduleError if ranks can end up waiting for one another, sends waiting until their receive is posted."""
    table, messages = dependencies.table, dependencies.messages
    collectives = dependencies.collective_needs()
    waits = Needs(
        np.concatenate([messages.send, messages.use, collectives.row]),
        np.concatenate([messages.receive, messages.send, collectives.needed]),
    )
    stuck = Progress(waits.row, waits.needed, table.offsets).stuck()
    if len(stuck):
        raise _deadlock(table, waits, stuck)


def _deadlock(table: Table, waits: Needs, stuck: Ints) -> ScheduleError:
    """Follow the waits from one stuck rank until they close, and report the circle."""
    waits_of = {int(table.rank[waits.row[index]]): index for index in stuck}
    rank = min(waits_of)
    seen: list[int] = []
    while rank in waits_of and rank not in seen:
        seen.append(rank)
        rank = int(table.rank[waits.needed[waits_of[rank]]])
    circle = seen[seen.index(rank) :] if rank in seen else seen
    lines = [f"{table.header.name} deadlocks: ranks {', '.join(map(str, circle))} wait for one another"]
    for member in circle:
        row, needed = (int(column[waits_of[member]]) for column in (waits.row, waits.needed))
        lines.append(
            f"{table.place_of(row)} is at {describe(action_at(table, row))} and waits for rank {table.rank[needed]} "
            f"to reach {describe(action_at(table, needed))}\n{neighbourhood(table, row)}"
        )
    return ScheduleError("\n".join(lines))
