"""Are sharded weights on hand wherever they are used, and never more of them than there are buffers?"""

import numpy as np

from megapipe.schedules.actions import Ints, Kind, Mask
from megapipe.schedules.gathers import USES, of_sharded_weights, places
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import failure

GATHERS = (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS)


def check_gathers(table: Table) -> None:
    """Raise ScheduleError at the first use without gathered weights, or gather or release out of place."""
    header = table.header
    rows = table.rows_with(*USES, *GATHERS)
    if header.weight_buffers == 0:
        wrong = table.is_kind(*GATHERS)[rows]
        _refuse(table, rows, wrong, "the schedule keeps its weights whole: its header says weight_buffers 0")
        return
    _refuse(table, rows, table.unit[rows] < 0, "weights are gathered unit by unit, and this is a whole chunk")
    sharded = of_sharded_weights(table, rows)
    wrong = table.is_kind(*GATHERS)[rows] & ~sharded
    _refuse(table, rows, wrong, "the weights of its unit are whole: the header's zero_stages say so")
    rows = rows[sharded]
    place = places(table, rows)
    order = np.lexsort((rows, place))
    rows, place = rows[order], place[order]
    _check_turns(table, rows, place)
    _check_buffers(table)


def _refuse(table: Table, rows: Ints, wrong: Mask, problem: str) -> None:
    if wrong.any():
        raise failure(table, int(rows[np.argmax(wrong)]), problem)


def _check_turns(table: Table, rows: Ints, place: Ints) -> None:
    """Each unit's rows, in order, are a gather, its uses, its release, and so on."""
    gather, release = (table.is_kind(kind)[rows] for kind in GATHERS)
    use = ~gather & ~release
    same = place[1:] == place[:-1]
    # What stands before (after) a row of the same unit; at the ends of a unit's rows, as if released (gathered) there.
    after_release, after_gather = (np.append(end, np.where(same, mark[:-1], end)) for mark, end in (
        (release, True), (gather, False)))  # fmt: skip
    before_gather = np.append(np.where(same, gather[1:], True), True)
    _refuse(table, rows, use & after_release, "the weights of its unit are not gathered here")
    _refuse(table, rows, gather & ~after_release, "the weights of its unit are already gathered")
    _refuse(table, rows, release & after_release, "the weights of its unit are not gathered here")
    _refuse(table, rows, release & after_gather, "nothing uses the weights between their gather and this")
    _refuse(table, rows, ~release & before_gather, "the weights of its unit are never released after it")
    microbatch = table.microbatch[rows]
    before, behind = np.append(microbatch[:1], microbatch[:-1]), np.append(microbatch[1:], microbatch[-1:])
    _refuse(table, rows, gather & (microbatch != behind), "it must name the micro-batch that first uses the weights")
    _refuse(table, rows, release & (microbatch != before), "it must name the micro-batch that last used the weights")


def _check_buffers(table: Table) -> None:
    """At no time more units' weights on a rank than it has buffers."""
    rows = table.rows_with(*GATHERS)
    change = np.where(table.is_kind(Kind.GATHER_WEIGHTS)[rows], 1, -1)
    held = np.cumsum(change)  # every rank's gathers are all released, so each rank starts from 0
    buffers = table.header.weight_buffers
    _refuse(table, rows, held > buffers, f"the rank has {buffers} buffers for gathered weights, and all are in use")
