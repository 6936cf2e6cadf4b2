"""Does a schedule also run where a GPU runs its communication kernels one after another, in launch order?

NCCL asks for that order when several communicators share a device (docs/nccl.md). A receive that is posted early then
keeps every later operation of the device from running until its message has arrived. Most schedules run only because
the kernels of several communicators are on the GPU at the same time, which is so in practice: each takes few thread
blocks. This module says which schedules rely on it.
"""

import numpy as np

from megapipe.schedules.actions import Kind, Mask
from megapipe.schedules.dependencies import Dependencies, Needs, Progress
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table
from megapipe.schedules.validation.transfers import collectives_by_group, host_waits

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


def needs_resident_kernels(schedule: Schedule) -> bool:
    """Whether ranks deadlock where each device runs its communication kernels one after another.

    The schedule is valid and lowered. Its compute runs in the background of the kernels, on a stream of its own.
    """
    table = Table.unroll(schedule, 1 if schedule.flushes else schedule.prologue_steps + _BODIES)
    dependencies = Dependencies(table)
    communicates = table.is_kind(*_COMMUNICATION)
    # Each rank has two lanes, computation and communication, whose rows pass in order.
    lane = 2 * table.rank + communicates
    order = np.argsort(lane, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    waits = [
        _launched_after_compute(table, communicates),
        _one_after_another(dependencies, communicates, flushes=schedule.flushes),
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


def _one_after_another(dependencies: Dependencies, communicates: Mask, *, flushes: bool) -> Needs:
    """A kernel starts after the one before it on its device has ended: when all of its ends have started."""
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
