"""Checks that messages meet: one order at both ends of a link, collectives in one order, no circle of waits.

A link carries the messages of an ordered pair of ranks, activations and gradients together, and matches them by their
order: it has no tags (docs/nccl.md).

NCCL asks that a GPU runs the communication kernels of several communicators one after another, in launch order. A
receive that is posted early then keeps every later operation of the device from running until its message has arrived.
Most schedules run only because these kernels are on the GPU at the same time, which is so in practice: each takes few
thread blocks. `needs_resident_kernels` returns whether a schedule relies on it.
"""

from collections.abc import Iterator

import numpy as np

from megapipe.schedules.actions import Ints, Kind, Mask, describe
from megapipe.schedules.dependencies import NO_NEEDS, Dependencies, Needs, Progress, shard_passes
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import action_at, failure
from megapipe.schedules.validation.order import deadlock, hanging


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


def check_collectives(table: Table, *, flushes: bool) -> None:
    """Raise ScheduleError where two ranks start the collectives of one group of ranks in different order.

    Reductions and gathers over data-parallel replicas need no check: a rank runs the same rows in every replica.
    Reductions over several holders of a part need it.
    """
    header = table.header
    group = np.where(table.is_kind(Kind.REDUCE_TIED), table.unit - table.num_states, 0)
    holder = np.array([holders[0] for holders in header.holders])[table.stage]
    group = np.where(table.is_kind(Kind.REDUCE_GRADIENTS), holder * header.most_states + table.unit, group)
    identity = (group * len(Kind) + table.kind) * table.num_microbatches + table.microbatch
    for members in collectives_by_group(table, flushes=flushes):
        for rows in members[1:]:
            differs = identity[rows] != identity[members[0]]
            if differs.any():
                index = int(np.argmax(differs))
                first = int(members[0][index])
                other = describe(action_at(table, first))
                raise failure(table, int(rows[index]), f"rank {table.rank[first]} starts {other} at this point")


def collectives_by_group(table: Table, *, flushes: bool) -> Iterator[list[Ints]]:
    """For each communicator over pipeline ranks, the rows of its collectives on each member, in program order.

    A schedule that never flushes sums its scalars in a communicator of their own, in the background of its actions.
    """
    header = table.header
    rows = table.rows_with(Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS)
    for each in (rows,) if flushes else (table.rows_with(Kind.REDUCE_COUNTS), table.rows_with(Kind.REDUCE_SCALARS)):
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
    """Rows that sum gradients of tied weights, or of a part of the model that several stages hold, ascending."""
    return np.sort(np.concatenate([table.rows_with(Kind.REDUCE_TIED), table.shared_reductions]))


def check_progress(dependencies: Dependencies, *, flushes: bool) -> None:
    """Raise ScheduleError if ranks can end up waiting for one another.

    Two kinds of waits are proved free of circles. With blocking sends nothing is buffered: a send ends when its
    receive is posted. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a GPU starts operations in the order of
    their launch, and one starts when the one before it on its communicator has ended. More queues, whatever they
    hold, leave out some of these waits, so the proof for one queue is a proof for any number.
    """
    table, messages = dependencies.table, dependencies.messages
    first, second = _neighbours_on_links(dependencies)
    collectives, scalars = dependencies.collective_needs(), host_waits(table) if flushes else NO_NEEDS
    arrivals = Needs(messages.use, messages.send)
    blocking = Needs(messages.send, messages.receive)
    receives = Needs(messages.receive[second], messages.send[first])
    reductions = _one_after_another(table, flushes)
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
        problem = "deadlocks on a GPU that starts operations in the order of their launch"
        problem = f"{problem} (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        raise deadlock(table, waits, stuck, problem, "post receives and start reductions later")


def _neighbours_on_links(dependencies: Dependencies) -> tuple[Ints, Ints]:
    """Indices of all messages that follow one another on a link: of the first, of the second."""
    table, messages = dependencies.table, dependencies.messages
    link = table.rank[messages.send] * table.header.num_ranks + table.rank[messages.receive]
    order = np.lexsort((messages.send, link))
    same = link[order][1:] == link[order][:-1]
    return order[:-1][same], order[1:][same]


def _one_after_another(table: Table, flushes: bool) -> Needs:
    """A collective starts when the one before it on its communicator has started on all members."""
    rows, needed = [], []
    for members in collectives_by_group(table, flushes=flushes):
        by_rank = np.stack(members)
        rows.append(np.repeat(by_rank[:, 1:], len(by_rank), axis=0).ravel())
        needed.append(np.tile(by_rank[:, :-1], (len(by_rank), 1)).ravel())
    return Needs(np.concatenate([NO_NEEDS.row, *rows]), np.concatenate([NO_NEEDS.needed, *needed]))


def host_waits(table: Table) -> Needs:
    """The row after a step's scalars needs the scalars and sums of all ranks: the engine reads them at once."""
    scalars = table.rows_with(Kind.REDUCE_SCALARS)
    following = scalars[scalars + 1 < table.offsets[table.rank[scalars] + 1]] + 1
    needed = np.concatenate([scalars, _sums_over_ranks(table)])
    return Needs(np.repeat(following, len(needed)), np.tile(needed, len(following)))


def _stuck(table: Table, *parts: Needs) -> tuple[Needs, Ints]:
    waits = Needs(np.concatenate([part.row for part in parts]), np.concatenate([part.needed for part in parts]))
    return waits, hanging(table, waits)


_COMMUNICATION = (
    Kind.SEND_ACTIVATION,
    Kind.RECV_ACTIVATION,
    Kind.SEND_GRADIENT,
    Kind.RECV_GRADIENT,
    Kind.REDUCE_COUNTS,
    Kind.REDUCE_SCALARS,
    Kind.REDUCE_TIED,
)
_BODIES = 2
"""Bodies of a schedule without a flush that `needs_resident_kernels` looks at."""


def needs_resident_kernels(schedule: Schedule) -> bool:
    """Whether ranks deadlock where each device runs its communication kernels one after another.

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
    waits = [
        _launched_after_compute(table, communicates),
        _kernels_one_after_another(dependencies, communicates, flushes=schedule.flushes),
    ]
    messages, collectives = dependencies.messages, dependencies.collective_needs()
    waits += [Needs(messages.use, messages.send), Needs(messages.use, messages.receive), collectives]
    if schedule.flushes:
        waits.append(host_waits(table))
    row, needed = (np.concatenate([getattr(part, name) for part in waits]) for name in ("row", "needed"))
    lanes = np.searchsorted(lane[order], np.arange(2 * table.header.num_ranks + 1))
    return len(Progress(place[table.action_first[row]], place[needed], lanes).stuck()) > 0


def _launched_after_compute(table: Table, communicates: Mask) -> Needs:
    """A kernel starts after the computation that its rank has launched before it."""
    index = np.arange(len(table.rows))
    latest = np.maximum.accumulate(np.where(communicates, -1, index))
    rows = np.flatnonzero(communicates)
    rows = rows[latest[rows] >= table.offsets[table.rank[rows]]]
    return Needs(rows, latest[rows])


def _kernels_one_after_another(dependencies: Dependencies, communicates: Mask, *, flushes: bool) -> Needs:
    """A kernel starts after the one before it on its device has ended, which is when all ranks that take part in that
    one have started it."""
    table, messages = dependencies.table, dependencies.messages
    rows = np.flatnonzero(communicates)
    same = table.rank[rows[1:]] == table.rank[rows[:-1]]
    following = np.full(len(table.rows), -1, dtype=np.int64)
    following[rows[:-1][same]] = rows[1:][same]
    parts = [Needs(following[messages.send], messages.receive), Needs(following[messages.receive], messages.send)]
    for members in collectives_by_group(table, flushes=flushes):
        by_rank = np.stack(members)
        rows = np.repeat(following[by_rank], len(by_rank), axis=0).ravel()
        parts.append(Needs(rows, np.tile(by_rank, (len(by_rank), 1)).ravel()))
    both = Needs(np.concatenate([part.row for part in parts]), np.concatenate([part.needed for part in parts]))
    return both.where_known()
