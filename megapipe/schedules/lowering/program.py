"""The working form of lowering: all ranks' rows in one table, sections still told apart."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from megapipe.schedules.actions import KIND, MICROBATCH, STAGE, UNIT, Ints, Kind, Mask, Rows, kind_mask
from megapipe.schedules.schedule import Header, Schedule

STEADY_BODIES: Final = 3
"""Bodies that a never-flushing schedule is lowered over; the middle one is its steady state."""


@dataclass(frozen=True)
class Program:
    """Rows of all ranks, rank by rank in program order, micro-batches and versions absolute.

    ``rank`` and ``section`` (0 prologue, 1.. bodies, last epilogue) have one entry a row.
    """

    header: Header
    rows: Rows
    rank: Ints
    section: Ints
    num_sections: int

    @classmethod
    def of(cls, schedule: Schedule) -> "Program":
        """The schedule unrolled far enough to show its steady state."""
        steps = 1 if schedule.flushes else schedule.prologue_steps + STEADY_BODIES
        parts = schedule.expand_sections(steps)
        sizes = [len(part) for rank_parts in parts for part in rank_parts]
        places = [(rank, section) for rank, rank_parts in enumerate(parts) for section in range(len(rank_parts))]
        rank, section = np.repeat(np.array(places, dtype=np.int64), sizes, axis=0).T
        rows = np.concatenate([part for rank_parts in parts for part in rank_parts])
        return cls(schedule.header, rows, rank, section, len(parts[0]))

    @property
    def kind(self) -> Rows:
        return self.rows[:, KIND]

    @property
    def stage(self) -> Rows:
        return self.rows[:, STAGE]

    @property
    def microbatch(self) -> Rows:
        return self.rows[:, MICROBATCH]

    @property
    def update(self) -> Ints:
        """Index of the update that each row's micro-batch belongs to."""
        return self.microbatch.astype(np.int64) // self.header.microbatches_per_update

    @property
    def units(self) -> Ints:
        """Number of units of each row's stage."""
        return np.array(self.header.units_per_stage, dtype=np.int64)[self.stage]

    def is_kind(self, *kinds: Kind) -> Mask:
        """Which rows have one of the kinds."""
        return kind_mask(self.kind, *kinds)

    def opens_chunk(self) -> Mask:
        """Which rows take the chunk's input: whole chunks, a forward's first unit, a backward's last one."""
        first = np.where(self.is_kind(Kind.FORWARD), 0, self.units - 1)
        opens: Mask = (self.rows[:, UNIT] < 0) | (self.rows[:, UNIT] == first)
        return opens

    def closes_chunk(self) -> Mask:
        """Which rows give the chunk's output: whole chunks, a forward's last unit, a backward's first one."""
        last = np.where(self.is_kind(Kind.FORWARD), self.units - 1, 0)
        closes: Mask = (self.rows[:, UNIT] < 0) | (self.rows[:, UNIT] == last)
        return closes


def last_row_per(keys: Ints, rows: Ints, num_keys: int) -> Ints:
    """For each key the last of the ascending ``rows`` that has it, -1 where none has."""
    last = np.full(num_keys, -1, dtype=np.int64)
    last[keys] = rows
    return last


def first_row_per(keys: Ints, rows: Ints, num_keys: int) -> Ints:
    """For each key the first of the ascending ``rows`` that has it, -1 where none has."""
    return last_row_per(keys[::-1], rows[::-1], num_keys)
