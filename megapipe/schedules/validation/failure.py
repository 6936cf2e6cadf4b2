"""Errors that show where a schedule goes wrong: rank, action, what it waits for, and the actions around it."""

from typing import Final

import numpy as np

from megapipe.schedules.actions import Action, Ints, Kind, Mask, describe, write_action
from megapipe.schedules.errors import ScheduleError, excerpt
from megapipe.schedules.table import Table

NEIGHBOURS: Final = 3


def action_at(table: Table, row: int) -> Action:
    """View of a row of the table."""
    kind, *fields = table.rows[row].tolist()
    return Action(Kind(kind), *fields)


def failure(table: Table, row: int, problem: str) -> ScheduleError:
    """An error at a row: its rank, its action, the problem, and the rank's actions around it."""
    where = f"{table.header.name}, {table.place_of(row)}, {describe(action_at(table, row), table.header.slices)}"
    return ScheduleError(f"{where}: {problem}", neighbourhood(table, row))


def refuse(table: Table, rows: Ints, wrong: Mask, problem: str) -> None:
    """Raise at the first of some rows that is marked as wrong."""
    if wrong.any():
        raise failure(table, int(rows[np.argmax(wrong)]), problem)


def missing(table: Table, rank: int, action: Action) -> ScheduleError:
    """An error for an action that a rank lacks; shows the rank's line, or its first actions."""
    first, last = table.offsets[rank : rank + 2].tolist()
    section = table.section_of(first) if last > first else "body"
    if table.origin is not None:
        near = excerpt(table.origin.text, table.origin.lines[section, rank])
    else:
        near = neighbourhood(table, first) if last > first else f"  rank {rank} has no actions"
    slices = table.header.slices
    return ScheduleError(
        f"{table.header.name}, {table.place_in(section, rank)}, {describe(action, slices)}: it never happens; add "
        f"{write_action(action, slices)} to this rank",
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
