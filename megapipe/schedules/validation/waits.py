"""Checks of order: every action comes after what it needs, messages match, and ranks never wait in a cycle.

On one rank, program order decides. Between ranks, a link carries the messages of an ordered pair of ranks, activations
and gradients together, and matches them by their order: it has no tags (docs/nccl.md).

NCCL asks that a GPU runs the communication kernels of several communicators one after another, in launch order. A
receive that is posted early then keeps every later operation of the device from running until its message has arrived.
Most schedules run only because these kernels are on the GPU at the same time, which is so in practice: each takes few
thread blocks. `needs_resident_kernels` returns whether a schedule relies on it.

NCCL connects two ranks when they first send or receive on a communicator, one direction at a time, and the members of
a group in their first collective. The call blocks the host of every member until all members have made it. So a rank
that posts an early receive does not reach the send that the other side waits for. `first_deadlock` finds those of
the first step.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import numpy as np

from megapipe.schedules.actions import (
    RECEIVES,
    SENDS,
    SUMS_OF_RANKS,
    Action,
    Ints,
    Kind,
    Mask,
    describe,
    short_word,
    write_action,
)
from megapipe.schedules.dependencies import NO_NEEDS, Dependencies, Needs, Progress, against_all, joined, shard_passes
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Connection, Schedule
from megapipe.schedules.table import Table, action_at, failure, neighbourhood, refuse


def check_compute_order(table: Table) -> None:
    """Raise ScheduleError unless compute actions, without lowering, can run in their order. The table is complete."""
    dependencies = Dependencies(table)
    check_local_order(table, dependencies.compute_needs())
    waits = dependencies.hand_overs(same_rank=False)
    stuck = hanging(table, waits)
    if len(stuck):
        raise deadlock(table, waits, stuck, "deadlocks")


def check_local_order(table: Table, kinds_of_needs: Iterable[Needs]) -> None:
    """Raise ScheduleError at the first action that comes before something that it needs on its rank."""
    for needs in kinds_of_needs:
        for wrong, where in (
            (needs.needed > needs.row, "comes after it"),
            (table.action_first[needs.needed] == table.action_first[needs.row], "is part of the same group"),
        ):
            if wrong.any():
                index, slices = int(np.argmax(wrong)), table.header.slices
                row, other = int(needs.row[index]), int(needs.needed[index])
                needed = action_at(table, other)
                remedy = f"move {write_action(needed, slices)} before it"
                if table.text_place(row)[1] and not table.text_place(other)[1]:
                    remedy = "move it to a later place"  # lowering added what it must follow
                raise failure(table, row, f"it needs {describe(needed, slices)}, which {where}; {remedy}")


def hanging(table: Table, waits: Needs) -> Ints:
    """Return the wait in which each rank is stuck; empty if all ranks complete."""
    # A group is one action: it starts when all of its rows can.
    return Progress(table.action_first[waits.row], waits.needed, table.offsets).stuck()


def deadlock(table: Table, waits: Needs, stuck: Ints, problem: str, remedy: str = "") -> ScheduleError:
    """Return the error for a deadlock: follow the waits from one stuck rank until they form a cycle, and describe it.

    stuck: as `hanging` gives it. remedy: by default, to move one of the actions that are waited for.
    """
    waits_of = {int(table.rank[waits.row[index]]): index for index in stuck}
    rank = min(waits_of)
    seen: list[int] = []
    while rank in waits_of and rank not in seen:
        seen.append(rank)
        rank = int(table.rank[waits.needed[waits_of[rank]]])
    cycle = seen[seen.index(rank) :] if rank in seen else seen
    at = [int(waits.row[waits_of[member]]) for member in cycle]
    needed = [int(waits.needed[waits_of[member]]) for member in cycle]
    # Each rank waits for an action of the next one, which is at an earlier action, or at this one.
    moves = list(zip(needed, at[1:] + at[:1], strict=True))
    steps = [_placed(table, at[0])]
    for wanted, before in moves:
        here = _word(table, before) if before == at[0] else _placed(table, before)
        steps.append(here if wanted == before else f"{_word(table, wanted)}, which comes after {here}")
    if not remedy:
        later = [each for each in moves if each[0] != each[1]]
        forwards = [each for each in later if table.kind[each[0]] == Kind.FORWARD]
        words = [f"{_word(table, wanted)} before {_word(table, before)}" for wanted, before in forwards or later]
        remedy = "change the order" + "".join(f", such as {each}" for each in words[:1])
    ranks, story = ", ".join(map(str, cycle)), ", which waits for ".join(steps)
    first = f"{table.header.name} {problem}: ranks {ranks} wait for each other in a cycle: {story}; {remedy}"
    near = "\n".join(neighbourhood(table, row) for row in at)
    return ScheduleError(first.replace(", which waits", " waits", 1), near)


def _placed(table: Table, row: int) -> str:
    return f"{_word(table, row)} of {table.place_of(row)}"


def _word(table: Table, row: int) -> str:
    """Return the word of a row, without what lowering adds to it."""
    return short_word(action_at(table, row), table.header.slices)


def check_links(dependencies: Dependencies) -> None:
    """Raise ScheduleError if a link's receives are posted in another order than its sends."""
    table, messages, link = dependencies.table, dependencies.messages, dependencies.link
    sent = np.lexsort((messages.send, link))
    received = np.lexsort((messages.receive, link))

    def problem(index: int) -> str:
        send = int(messages.send[sent[index]])
        shown = f"rank {table.rank[send]} sends {describe(action_at(table, send))}"
        return f"{shown} on this link at this point; receives must be posted in the order of the sends"

    refuse(table, messages.receive[received], sent != received, problem)


def check_collectives(table: Table) -> None:
    """Raise ScheduleError if two ranks start the collectives of one group of ranks in different orders.

    Reductions and gathers over data-parallel replicas need no check: a rank runs the same rows in every replica.
    Reductions over several holders of a part need it.
    """
    header = table.header
    group = np.where(table.is_kind(Kind.REDUCE_TIED), table.unit - table.num_states, 0)
    holder = np.array([holders[0] for holders in header.holders])[table.stage]
    group = np.where(table.is_kind(Kind.REDUCE_GRADIENTS), holder * header.most_states + table.unit, group)
    identity = (group * len(Kind) + table.kind) * table.num_microbatches + table.microbatch
    for members in collectives_by_group(table):
        for rows in members[1:]:
            differs = identity[rows] != identity[members[0]]
            if differs.any():
                index = int(np.argmax(differs))
                first = int(members[0][index])
                other = describe(action_at(table, first))
                raise failure(table, int(rows[index]), f"rank {table.rank[first]} starts {other} at this point")


def collectives_by_group(table: Table) -> Iterator[list[Ints]]:
    """Yield, for each communicator over pipeline ranks, the rows of its collectives on each member, in program order.

    A schedule that never flushes sums its scalars in a separate communicator, in the background of its actions.
    """
    header = table.header
    rows = table.rows_with(Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS)
    apart = table.rows_with(Kind.REDUCE_COUNTS), table.rows_with(Kind.REDUCE_SCALARS)
    for each in (rows,) if table.flushes else apart:
        yield [each[table.rank[each] == rank] for rank in range(header.num_ranks)]
    if header.vocabulary:
        yield shard_passes(table)
    sums = _sums_over_ranks(table)
    places = zip(table.stage[sums].tolist(), table.unit[sums].tolist(), strict=True)
    by_ranks: dict[frozenset[int], list[int]] = {}
    for row, (stage, unit) in zip(sums.tolist(), places, strict=True):
        by_ranks.setdefault(header.summing_ranks(stage, unit), []).append(row)
    for ranks, members in by_ranks.items():
        rows = np.array(members)
        yield [rows[table.rank[rows] == rank] for rank in sorted(ranks)]


def _sums_over_ranks(table: Table) -> Ints:
    """Return the rows that sum gradients of tied weights, or of a part of the model that several stages hold,
    ascending."""
    return np.union1d(table.rows_with(Kind.REDUCE_TIED), table.shared_reductions)


def check_progress(dependencies: Dependencies) -> None:
    """Raise ScheduleError if ranks can end up waiting for one another.

    Two kinds of waits are proved free of cycles. With blocking sends nothing is buffered: a send ends when its
    receive is posted. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a GPU starts operations in the order of
    their launch, and one starts when the one before it on its communicator has ended. More queues, whatever they
    hold, leave out some of these waits, so the proof for one queue is a proof for any number.
    """
    table, messages = dependencies.table, dependencies.messages
    first, second = _neighbours_on_links(dependencies)
    collectives, scalars = dependencies.collective_needs(), host_waits(table)
    arrivals = Needs(messages.use, messages.send)
    blocking = Needs(messages.send, messages.receive)
    receives = Needs(messages.receive[second], messages.send[first])
    reductions = _one_after_another(table)
    always = (arrivals, collectives, scalars)
    # Lowered schedules pass with both kinds of waits at once, in one pass. They only have to pass with each kind by
    # itself.
    if not len(_stuck(table, blocking, receives, reductions, *always)[1]):
        return
    waits, stuck = _stuck(table, blocking, *always)
    if len(stuck):
        raise deadlock(table, waits, stuck, "deadlocks")
    sends = Needs(messages.send[second], messages.receive[first])
    waits, stuck = _stuck(table, sends, receives, reductions, *always)
    if len(stuck):
        what = "deadlocks on a GPU that starts operations in the order of their launch"
        what = f"{what} (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        raise deadlock(table, waits, stuck, what, "post receives and start reductions later")


def _neighbours_on_links(dependencies: Dependencies) -> tuple[Ints, Ints]:
    """Return the indices of all messages that follow one another on a link: of the first, of the second."""
    link = dependencies.link
    order = np.lexsort((dependencies.messages.send, link))
    same = link[order][1:] == link[order][:-1]
    return order[:-1][same], order[1:][same]


def _one_after_another(table: Table) -> Needs:
    """A collective starts when the one before it on its communicator has started on all members."""
    groups = map(np.stack, collectives_by_group(table))
    return joined(*(against_all(by_rank[:, 1:], by_rank[:, :-1]) for by_rank in groups))


def host_waits(table: Table) -> Needs:
    """The row after a step's scalars needs the scalars and sums of all ranks, unless the schedule never flushes: the
    engine reads them at once."""
    if not table.flushes:
        return NO_NEEDS
    scalars = table.rows_with(Kind.REDUCE_SCALARS)
    following = scalars[scalars + 1 < table.offsets[table.rank[scalars] + 1]] + 1
    needed = np.concatenate([scalars, _sums_over_ranks(table)])
    return Needs(np.repeat(following, len(needed)), np.tile(needed, len(following)))


def _stuck(table: Table, *parts: Needs) -> tuple[Needs, Ints]:
    waits = joined(*parts)
    return waits, hanging(table, waits)


_COMMUNICATION: Final = (*SENDS, *RECEIVES, *SUMS_OF_RANKS)
_BODIES = 2
"""Bodies of a schedule without a flush that `needs_resident_kernels` looks at."""


def needs_resident_kernels(schedule: Schedule) -> bool:
    """Return whether ranks deadlock if each device runs its communication kernels one after another.

    The schedule is valid and lowered. Its compute runs in the background of the kernels, on a stream of its own.
    """
    table = Table.unroll(schedule, 1 if schedule.flushes else schedule.prologue_steps + _BODIES)
    dependencies = Dependencies(table)
    communicates = table.is_kind(*_COMMUNICATION)
    communicates[table.shared_reductions] = True
    communicates[np.concatenate([NO_NEEDS.row, *shard_passes(table)])] = True
    # Each rank has two lanes, computation and communication, whose rows pass in order.
    lane = 2 * table.rank + communicates
    order = np.argsort(lane, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    messages = dependencies.messages
    row, needed = joined(
        _launched_after_compute(table, communicates),
        _kernels_one_after_another(dependencies, communicates),
        Needs(messages.use, messages.send),
        Needs(messages.use, messages.receive),
        dependencies.collective_needs(),
        host_waits(table),
    )
    lanes = np.searchsorted(lane[order], np.arange(2 * table.header.num_ranks + 1))
    return len(Progress(place[table.action_first[row]], place[needed], lanes).stuck()) > 0


def _launched_after_compute(table: Table, communicates: Mask) -> Needs:
    """A kernel starts after the computation that its rank has launched before it."""
    index = np.arange(len(table.rows))
    latest = np.maximum.accumulate(np.where(communicates, -1, index))
    rows = np.flatnonzero(communicates)
    rows = rows[latest[rows] >= table.offsets[table.rank[rows]]]
    return Needs(rows, latest[rows])


def _kernels_one_after_another(dependencies: Dependencies, communicates: Mask) -> Needs:
    """A kernel starts after the one before it on its device has ended, which is when all ranks that take part in that
    one have started it."""
    table, messages = dependencies.table, dependencies.messages
    rows = np.flatnonzero(communicates)
    same = table.rank[rows[1:]] == table.rank[rows[:-1]]
    following = np.full(len(table.rows), -1, dtype=np.int64)
    following[rows[:-1][same]] = rows[1:][same]
    parts = [Needs(following[messages.send], messages.receive), Needs(following[messages.receive], messages.send)]
    for members in collectives_by_group(table):
        by_rank = np.stack(members)
        parts.append(against_all(following[by_rank], by_rank))
    return joined(*parts).where_known()


_Meeting = Connection | frozenset[int]
"""A link, or the ranks of a group with a reduction."""


def first_uses(table: Table) -> list[dict[_Meeting, Action]]:
    """Return the first use of each link and group by each rank of a lowered schedule, in program order, with its
    action."""
    uses: list[dict[_Meeting, Action]] = [{} for _ in range(table.header.num_ranks)]
    rows = np.union1d(table.rows_with(*_COMMUNICATION), table.shared_reductions)
    route = table.microbatch % len(table.header.routes)
    places = np.stack([table.rank, table.kind, table.stage, table.unit, route], axis=1)
    # The first rows of each kind, stage, unit and route include all first uses.
    first: Ints = np.unique(places[rows], axis=0, return_index=True)[1]
    for row in np.sort(rows[first]).tolist():
        meeting = _meeting(table, row)
        if len(meeting) > 1:
            uses[table.rank[row]].setdefault(meeting, action_at(table, row))
    return uses


def first_deadlock(uses: list[dict[_Meeting, Action]], connected: Collection[Connection]) -> str:
    """Return where ranks deadlock in their first uses, or an empty string if they do not.

    connected: links that all ranks connect at the start, in this order.
    """
    programs: list[deque[tuple[_Meeting, Action | None]]] = []
    for rank, rank_uses in enumerate(uses):
        start = [pair for pair in connected if rank in pair]
        later = (use for use in rank_uses.items() if use[0] not in start)
        programs.append(deque([*((pair, None) for pair in start), *later]))
    moved = True
    while moved:
        moved = False
        waiting: dict[_Meeting, set[int]] = {}
        for rank, program in enumerate(programs):
            if program:
                waiting.setdefault(program[0][0], set()).add(rank)
        for meeting, present in waiting.items():
            if present == set(meeting):
                moved = True
                for rank in present:
                    programs[rank].popleft()
    hanging = ((rank, program[0][1]) for rank, program in enumerate(programs) if program)
    return "; ".join(f"rank {rank} at {describe(action) if action else 'its start'}" for rank, action in hanging)


def _meeting(table: Table, row: int) -> _Meeting:
    header = table.header
    kind, stage = Kind(int(table.kind[row])), int(table.stage[row])
    if kind in (Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS):
        return frozenset(range(header.num_ranks))
    if kind in (Kind.REDUCE_TIED, Kind.REDUCE_GRADIENTS):
        return header.summing_ranks(stage, int(table.unit[row]))
    with_following = kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
    neighbours = header.following_stages if with_following else header.preceding_stages
    neighbour = neighbours[table.microbatch[row] % len(header.routes), stage]
    rank, other = header.stages[stage].rank, header.stages[neighbour].rank
    return (rank, other) if kind in SENDS else (other, rank)
