"""How far each rank gets when ranks wait for one another: the deadlock test that lowering and validator share."""

from typing import Final

import numpy as np

from megapipe.schedules.actions import Ints

MOST_SWEEPS_BETWEEN_CHECKS: Final = 32


class Progress:
    """Ranks that pass their rows in order, each row once what it waits for has been passed.

    ``row[i]`` waits for ``needed[i]``; both index one table, rank by rank, whose first rows per rank are ``offsets``
    (shape [ranks + 1]). A row may stand in several waits. All ranks advance together, one wait a sweep, as columns:
    the cost is the longest chain of waits, whatever the number of ranks.
    """

    def __init__(self, row: Ints, needed: Ints, offsets: Ints) -> None:
        num_ranks = len(offsets) - 1
        self._order = np.argsort(row, kind="stable")
        self._place = np.empty(len(row), dtype=np.int64)
        ends = np.searchsorted(row[self._order], offsets[1:])
        firsts = np.searchsorted(row[self._order], offsets[:-1])
        # A rank that is through hangs in a wait of its own at the end of its rows that nothing can meet.
        through = np.arange(num_ranks)
        self._row = np.insert(row[self._order], ends, offsets[1:])
        self._needed = np.insert(needed[self._order], ends, np.iinfo(np.int64).max)
        self._needed_rank = np.searchsorted(offsets, self._needed, side="right") - 1
        self._needed_rank = np.minimum(self._needed_rank, num_ranks - 1)
        self._pointer, self._ends, self._through = firsts + through, ends + through, through
        shift = np.searchsorted(offsets, row[self._order], side="right") - 1
        self._place[self._order] = np.arange(len(row)) + shift

    def stuck(self) -> Ints:
        """Advance as far as possible; the wait that each stuck rank hangs in, empty when all are through."""
        row, needed, needed_rank, pointer = self._row, self._needed, self._needed_rank, self._pointer
        sweeps, before = 1, -1
        while before != (before := int(pointer.sum())):
            for _ in range(sweeps):
                pointer += row[pointer][needed_rank[pointer]] > needed[pointer]
            sweeps = min(2 * sweeps, MOST_SWEEPS_BETWEEN_CHECKS)
        stuck = pointer < self._ends
        hanging: Ints = self._order[(pointer - self._through)[stuck]]
        return hanging

    def release(self, waits: Ints) -> None:
        """Count the waits as met from now on."""
        self._needed[self._place[waits]] = -1
