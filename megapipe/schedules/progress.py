"""How far each rank gets when ranks wait for one another: the deadlock test that lowering and validator share."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from megapipe.schedules.actions import Ints

SWEEPS_BETWEEN_CHECKS: Final = 16


@dataclass(frozen=True)
class Waits:
    """``row[i]`` cannot be passed before ``needed[i]`` has been; both index one table, rank by rank.

    A row may stand in several waits. Rows of the same rank are passed in order.
    """

    row: Ints
    needed: Ints


def stuck_waits(waits: Waits, offsets: Ints) -> Ints:
    """Indices into ``waits`` of the wait that each stuck rank hangs in; empty when every rank reaches its end.

    ``offsets`` (shape [ranks + 1]) are the table's first rows per rank. All ranks advance together, one wait a
    sweep, as columns: the cost is the longest chain of waits, whatever the number of ranks.
    """
    num_ranks = len(offsets) - 1
    order = np.argsort(waits.row, kind="stable")
    row, needed = waits.row[order], waits.needed[order]
    firsts = np.searchsorted(row, offsets[:-1])
    ends = np.searchsorted(row, offsets[1:])
    # A rank that is through hangs in a wait of its own at the end of its rows that nothing can meet.
    through = np.arange(num_ranks)
    row = np.insert(row, ends, offsets[1:])
    needed = np.insert(needed, ends, np.iinfo(np.int64).max)
    needed_rank = np.minimum(np.searchsorted(offsets, needed, side="right") - 1, num_ranks - 1)
    pointer, ends = firsts + through, ends + through
    while True:
        before = pointer.copy()
        for _ in range(SWEEPS_BETWEEN_CHECKS):
            reached = row[pointer]
            pointer += reached[needed_rank[pointer]] > needed[pointer]
        if np.array_equal(before, pointer):
            break
    stuck = pointer < ends
    hanging: Ints = order[(pointer - through)[stuck]]
    return hanging
