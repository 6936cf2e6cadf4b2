"""Does everything come after what it needs? On one rank by program order, between ranks without a circle of waits."""

from collections.abc import Iterable

import numpy as np

from megapipe.schedules.actions import Ints, Kind, describe, write_action
from megapipe.schedules.dependencies import Dependencies, Needs, Progress
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import action_at, failure, neighbourhood


def check_compute_order(table: Table) -> None:
    """Raise ScheduleError unless compute actions, without lowering, can run in their order. The table is complete."""
    dependencies = Dependencies(table)
    check_local_order(table, dependencies.compute_needs())
    waits = dependencies.remote_needs()
    stuck = hanging(table, waits)
    if len(stuck):
        raise deadlock(table, waits, stuck, "deadlocks")


def check_local_order(table: Table, parts: Iterable[Needs]) -> None:
    """Raise ScheduleError at the first action that comes before something that it needs on its rank."""
    for needs in parts:
        wrong = needs.needed > needs.row
        if wrong.any():
            index = int(np.argmax(wrong))
            row, late = int(needs.row[index]), int(needs.needed[index])
            remedy = f"move {write_action(action_at(table, late), table.header.slices)} before it"
            if table.text_place(row)[1] and not table.text_place(late)[1]:
                remedy = "move it to a later place"  # the text has no word for what lowering placed after it
            shown = describe(action_at(table, late), table.header.slices)
            raise failure(table, row, f"it needs {shown}, which comes after it; {remedy}")
        joined = table.action_first[needs.needed] == table.action_first[needs.row]
        if joined.any():
            index = int(np.argmax(joined))
            needed, slices = action_at(table, int(needs.needed[index])), table.header.slices
            raise failure(
                table,
                int(needs.row[index]),
                f"it needs {describe(needed, slices)}, which is part of the same group; move "
                f"{write_action(needed, slices)} before it",
            )


def hanging(table: Table, waits: Needs) -> Ints:
    """Return the wait in which each rank hangs, empty if all ranks get through."""
    # A group is one action: it starts when all of its rows can.
    return Progress(table.action_first[waits.row], waits.needed, table.offsets).stuck()


def deadlock(table: Table, waits: Needs, stuck: Ints, problem: str, remedy: str = "") -> ScheduleError:
    """Follow the waits from one stuck rank until they close, and report the circle.

    stuck: as `hanging` gives it. remedy: by default, to move one of the actions that are waited for.
    """
    waits_of = {int(table.rank[waits.row[index]]): index for index in stuck}
    rank = min(waits_of)
    seen: list[int] = []
    while rank in waits_of and rank not in seen:
        seen.append(rank)
        rank = int(table.rank[waits.needed[waits_of[rank]]])
    circle = seen[seen.index(rank) :] if rank in seen else seen
    at = [int(waits.row[waits_of[member]]) for member in circle]
    needed = [int(waits.needed[waits_of[member]]) for member in circle]
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
    ranks, story = ", ".join(map(str, circle)), ", which waits for ".join(steps)
    first = f"{table.header.name} {problem}: ranks {ranks} wait for each other in a cycle: {story}; {remedy}"
    near = "\n".join(neighbourhood(table, row) for row in at)
    return ScheduleError(first.replace(", which waits", " waits", 1), near)


def _placed(table: Table, row: int) -> str:
    return f"{_word(table, row)} of {table.place_of(row)}"


def _word(table: Table, row: int) -> str:
    """The word of a row, without what lowering adds to it."""
    return write_action(action_at(table, row)._replace(version=-1, slot=-1), table.header.slices)
