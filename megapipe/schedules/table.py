"""A schedule unrolled over some steps: all ranks' rows in one table. The working form of lowering and validation.

An error about a row (`failure`) or about one that is missing shows the rank, the action, the problem, and the actions
around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from megapipe.schedules.actions import (
    ADDING,
    GROUP,
    KIND,
    MICROBATCH,
    SLOT,
    STAGE,
    UNIT,
    VERSION,
    Action,
    Ints,
    Kind,
    Mask,
    Rows,
    describe,
    kind_mask,
    write_action,
)
from megapipe.schedules.errors import ScheduleError, excerpt
from megapipe.schedules.schedule import Header, Origin, Schedule, SectionName


def _column(number: int) -> cached_property[Rows]:
    """Return a property of `Table`: a column of its rows, contiguous in memory."""
    return cached_property(lambda table: np.ascontiguousarray(table.rows[:, number]))


@dataclass(frozen=True)
class Table:
    """Rows of all ranks, rank by rank in program order, micro-batches and versions absolute.

    ``rank`` and ``section`` (0 prologue, 1.. bodies, last epilogue) have one entry a row. Of two rows of one rank, the
    one with the lower index comes first. ``flushes``: as in `Schedule`.
    """

    header: Header
    rows: Rows
    rank: Ints
    section: Ints
    num_sections: int
    steps: int
    flushes: bool
    origin: Origin | None = None

    @classmethod
    def unroll(cls, schedule: Schedule, steps: int) -> "Table":
        """Return the table of ``steps`` optimizer steps."""
        parts = schedule.expand_sections(steps)
        sizes = [len(part) for rank_parts in parts for part in rank_parts]
        places = [(rank, section) for rank, rank_parts in enumerate(parts) for section in range(len(rank_parts))]
        rank, section = np.repeat(np.array(places, dtype=np.int64), sizes, axis=0).T
        rows = np.concatenate([part for rank_parts in parts for part in rank_parts])
        return cls(
            schedule.header, rows, np.ascontiguousarray(rank), np.ascontiguousarray(section), len(parts[0]), steps,
            schedule.flushes, schedule.origin,
        )  # fmt: skip

    def place_of(self, row: int) -> str:
        """Return the rank of a row, and its line if the schedule was read from a text."""
        if self.origin is None:
            return f"rank {self.rank[row]}"
        return f"rank {self.rank[row]} ({self.origin.source}, line {self.text_place(row)[0]})"

    def text_place(self, row: int) -> tuple[int, int]:
        """Return line and column of a row in the text that the schedule was read from, counted from 1; column 0 for
        a row that lowering added, and 0, 0 without a text."""
        if self.origin is None:
            return 0, 0
        first = self.offsets[self.rank[row]]
        same = [KIND, STAGE, UNIT, MICROBATCH]
        earlier = int(np.count_nonzero((self.rows[first:row, same] == self.rows[row, same]).all(axis=1)))
        place = self.section_of(row), int(self.rank[row])
        return self.origin.place_of(*place, self.rows[row], earlier, self.header.num_microbatches)

    def section_of(self, row: int) -> SectionName:
        """Return the section of a row."""
        section = int(self.section[row])
        return "prologue" if section == 0 else "epilogue" if section == self.num_sections - 1 else "body"

    @cached_property
    def part(self) -> Ints:
        """Rank and section of each row as one number, ascending: ``rank * num_sections + section``."""
        return self.rank * self.num_sections + self.section

    kind = _column(KIND)
    """Kind of each row's action, as `Kind`."""
    stage = _column(STAGE)
    """Stage of each row."""
    unit = _column(UNIT)
    """Unit of each row within its stage; -1 for the whole stage."""
    microbatch = _column(MICROBATCH)
    """Micro-batch of each row, counted from the first step; -1 for none."""
    version = _column(VERSION)
    """Weight version that each row reads or writes; -1 for none."""
    slot = _column(SLOT)
    """Buffer slot of each row's message; -1 for none."""
    group = _column(GROUP)
    """Group of each row; rows of one group are one action, -1 for a row that is an action by itself."""

    @cached_property
    def action_first(self) -> Ints:
        """First row of the action that each row belongs to: of its group, or the row itself."""
        return self._action_bounds[0]

    @cached_property
    def action_last(self) -> Ints:
        """Last row of the action that each row belongs to."""
        return self._action_bounds[1]

    @cached_property
    def _action_bounds(self) -> tuple[Ints, Ints]:
        rows = np.arange(len(self.rows))
        if not (self.group >= 0).any():
            return rows, rows
        joined = (self.group[1:] >= 0) & (self.group[1:] == self.group[:-1])
        joined &= self.part[1:] == self.part[:-1]
        starts = np.flatnonzero(np.append(True, ~joined))
        action = np.searchsorted(starts, rows, side="right") - 1
        return starts[action], np.append(starts[1:], len(rows))[action] - 1

    @cached_property
    def update(self) -> Ints:
        """Index of the update that each row's micro-batch belongs to."""
        return self.microbatch.astype(np.int64) // self.header.microbatches_per_update

    @cached_property
    def stage_update(self) -> Ints:
        """Stage and update of each row as one number: ``stage * num_updates + update``."""
        return self.stage * self.num_updates + self.update

    @cached_property
    def step(self) -> Ints:
        """Index of the step that each row's micro-batch belongs to."""
        return self.microbatch.astype(np.int64) // self.header.num_microbatches

    @cached_property
    def key(self) -> Ints:
        """Stage and micro-batch of each row as one number: ``stage * num_microbatches + microbatch``."""
        return self.stage.astype(np.int64) * self.num_microbatches + self.microbatch

    @cached_property
    def offsets(self) -> Ints:
        """First row of each rank, and the number of rows; shape [ranks + 1]."""
        return np.searchsorted(self.rank, np.arange(self.header.num_ranks + 1))

    @cached_property
    def last_added(self) -> Ints:
        """The last row that adds to each stage's gradients in each update, -1 where none; shape [stages, updates]."""
        rows = self.rows_with(*ADDING)
        by_place = last_row_per(self.stage_update[rows], rows, self.num_stages * self.num_updates)
        return by_place.reshape(-1, self.num_updates)

    @property
    def num_stages(self) -> int:
        return len(self.header.stages)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all steps."""
        return self.steps * self.header.num_microbatches

    @property
    def num_updates(self) -> int:
        """Updates of all steps."""
        return self.steps * self.header.updates_per_step

    @cached_property
    def units(self) -> Ints:
        """Number of units of each row's stage."""
        return np.array(self.header.units_per_stage, dtype=np.int64)[self.stage]

    @cached_property
    def num_states(self) -> Ints:
        """Number of state units of each row's stage, without tied weights."""
        return np.array([len(units) for units in self.header.stage_states], dtype=np.int64)[self.stage]

    @cached_property
    def shared_reductions(self) -> Ints:
        """Rows that sum gradients over all stages that hold one part of the model, on other ranks too."""
        rows = self.rows_with(Kind.REDUCE_GRADIENTS)
        return rows[self.header.shared[self.stage[rows]]]

    def is_kind(self, *kinds: Kind) -> Mask:
        """Return which rows have one of the kinds."""
        return kind_mask(self.kind, *kinds)

    def rows_with(self, *kinds: Kind) -> Ints:
        """Return the indices of the rows that have one of the kinds, ascending."""
        by_kind = [self._rows_by_kind[kind] for kind in kinds]
        return by_kind[0] if len(by_kind) == 1 else np.sort(np.concatenate(by_kind))

    @cached_property
    def _rows_by_kind(self) -> list[Ints]:
        """Indices of the rows of each kind, ascending."""
        order = np.argsort(self.kind.astype(np.int8), kind="stable")  # a linear-time sort
        bounds = np.searchsorted(self.kind[order], np.arange(len(Kind) + 1))
        return [order[first:last] for first, last in pairwise(bounds.tolist())]

    def last_by_key(self, *kinds: Kind) -> Ints:
        """Return the last row of the kinds for each stage and micro-batch, -1 where none; shape [stages *
        micro-batches]."""
        rows = self.rows_with(*kinds)
        return last_row_per(self.key[rows], rows, self.num_stages * self.num_microbatches)

    def first_by_key(self, *kinds: Kind) -> Ints:
        """Return the first row of the kinds for each stage and micro-batch, -1 where none; shape [stages *
        micro-batches]."""
        rows = self.rows_with(*kinds)
        return first_row_per(self.key[rows], rows, self.num_stages * self.num_microbatches)

    def first_by_step(self, rows: Ints) -> Ints:
        """Return the first of the ascending ``rows`` of each rank and step, -1 where none; shape [ranks, steps]."""
        return self._first_by_rank(rows, self.step, self.steps)

    def first_by_update(self, rows: Ints) -> Ints:
        """Return the same for each rank and update; shape [ranks, updates]."""
        return self._first_by_rank(rows, self.update, self.num_updates)

    def _first_by_rank(self, rows: Ints, period: Ints, count: int) -> Ints:
        num_ranks, place = self.header.num_ranks, self.rank[rows] * count + period[rows]
        return first_row_per(place, rows, num_ranks * count).reshape(num_ranks, count)


def last_row_per(keys: Ints, rows: Ints, num_keys: int) -> Ints:
    """Return for each key the last of the ascending ``rows`` that has it, -1 where none has; shape [num_keys]."""
    last = np.full(num_keys, -1, dtype=np.int64)
    last[keys] = rows
    return last


def first_row_per(keys: Ints, rows: Ints, num_keys: int) -> Ints:
    """Return for each key the first of the ascending ``rows`` that has it, -1 where none has; shape [num_keys]."""
    # Copies, not views: numpy may walk indices of negative stride in memory order, and then the last does not win.
    return last_row_per(keys[::-1].copy(), rows[::-1].copy(), num_keys)


NEIGHBOURS: Final = 3
"""Number of actions that an error shows before and after its own."""


def action_at(table: Table, row: int) -> Action:
    """Return a row of the table as an action."""
    kind, *fields = table.rows[row].tolist()
    return Action(Kind(kind), *fields)


def failure(table: Table, row: int, problem: str) -> ScheduleError:
    """Return an error at a row: its rank, its action, the problem, and the rank's actions around it."""
    where = f"{table.header.name}, {table.place_of(row)}, {describe(action_at(table, row), table.header.slices)}"
    return ScheduleError(f"{where}: {problem}", neighbourhood(table, row))


def refuse(table: Table, rows: Ints, wrong: Mask, problem: str | Callable[[int], str]) -> None:
    """Raise at the first of some rows that is marked as wrong. problem: may depend on its index among the rows."""
    if wrong.any():
        index = int(np.argmax(wrong))
        raise failure(table, int(rows[index]), problem if isinstance(problem, str) else problem(index))


def refuse_repeated(table: Table, rows: Ints, places: Ints, remedy: str = "") -> None:
    """Raise at the second of two rows that have the same place. places: of each of the rows."""
    order = np.argsort(places, kind="stable")
    repeated = np.append(False, places[order][1:] == places[order][:-1])
    refuse(table, rows[order], repeated, f"it appears a second time{remedy}")


def missing(table: Table, rank: int, action: Action) -> ScheduleError:
    """Return an error for an action that a rank lacks; shows the rank's line, or its first actions."""
    first, last = table.offsets[rank : rank + 2].tolist()
    where = f"rank {rank}"
    near = neighbourhood(table, first) if last > first else f"  rank {rank} has no actions"
    if table.origin is not None:
        number = table.origin.ranks[table.section_of(first) if last > first else "body", rank].number
        where, near = f"{where} ({table.origin.source}, line {number})", excerpt(table.origin.text, number)
    slices = table.header.slices
    return ScheduleError(
        f"{table.header.name}, {where}, {describe(action, slices)}: "
        f"it never happens; add {write_action(action, slices)} to this rank",
        near,
    )


def neighbourhood(table: Table, row: int) -> str:
    """Return the actions around one of them, which is marked: the lines of the text, or rows if no text names it."""
    line, column = table.text_place(row)
    if table.origin is not None and column:
        return excerpt(table.origin.text, line, column)
    first, last = table.offsets[table.rank[row] : table.rank[row] + 2].tolist()
    lines = []
    for near in range(max(first, row - NEIGHBOURS), min(last, row + NEIGHBOURS + 1)):
        mark = ">" if near == row else " "
        lines.append(f"  {mark} {near - first:6d}  {write_action(action_at(table, near), table.header.slices)}")
    return "\n".join(lines)
