"""Are sharded gradients reduced behind every stay in a buffer, and never more of them whole than there are buffers?"""

import numpy as np

from megapipe.schedules.actions import Ints, Kind, Mask
from megapipe.schedules.gathers import ADDING, of_sharded_gradients, places
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import failure


def check_gradients(table: Table) -> None:
    """Raise ScheduleError at the first reduction of sharded gradients out of place, or gradient without one."""
    header = table.header
    if header.mode == "forward" or header.whole_gradients == 0:
        return
    rows = table.rows_with(*ADDING, Kind.REDUCE_GRADIENTS)
    _refuse(table, rows, table.unit[rows] < 0, "gradients are reduced unit by unit, and this is a whole chunk")
    rows = rows[of_sharded_gradients(table, rows)]
    place = places(table, rows)
    order = np.lexsort((rows, place))
    _check_turns(table, rows[order], place[order])
    _check_buffers(table, rows[order], place[order])


def _refuse(table: Table, rows: Ints, wrong: Mask, problem: str) -> None:
    if wrong.any():
        raise failure(table, int(rows[np.argmax(wrong)]), problem)


def _check_turns(table: Table, rows: Ints, place: Ints) -> None:
    """Each unit's rows, in order, are backwards, a reduction, and so on, a reduction last."""
    reduces = table.is_kind(Kind.REDUCE_GRADIENTS)[rows]
    same = place[1:] == place[:-1]
    after_addition = np.append(False, same & ~reduces[:-1])
    last = np.append(~same, True)
    _refuse(table, rows, reduces & ~after_addition, "nothing was added to the gradient since its last reduction")
    _refuse(table, rows, last & ~reduces, "the gradient of its unit is not reduced after it")
    microbatch = table.microbatch[rows]
    before = np.append(microbatch[:1], microbatch[:-1])
    _refuse(table, rows, reduces & (microbatch != before), "it must name the last micro-batch that it includes")


def _check_buffers(table: Table, rows: Ints, place: Ints) -> None:
    """At no time more unreduced gradients on a rank than it has buffers."""
    reduces = table.is_kind(Kind.REDUCE_GRADIENTS)[rows]
    opens = ~reduces & np.append(True, (place[1:] != place[:-1]) | reduces[:-1])
    change = np.zeros(len(table.rows), dtype=np.int64)
    change[rows[opens]] = 1
    change[rows[reduces]] = -1
    held = np.cumsum(change)  # every rank's gradients are all reduced, so each rank starts from 0
    buffers = table.header.whole_gradients
    every = np.arange(len(held))
    _refuse(table, every, held > buffers, f"the rank has {buffers} buffers for whole gradients, and all are in use")
