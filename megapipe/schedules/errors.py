"""The exception of the schedules package, and the lines of a schedule file that an error shows."""

from collections.abc import Sequence
from typing import Final

WIDTH: Final = 100


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run.

    The message is one line that names the rule that the schedule breaks and how to fix it. near: the actions around
    the fault, in lines of their own; a note of the exception, which tracebacks show.
    """

    def __init__(self, message: str, near: str = "") -> None:
        super().__init__(message)
        if near:
            self.add_note(near)

    @property
    def shown(self) -> str:
        """The message, with the actions around the fault below it."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


def excerpt(lines: Sequence[str], number: int, column: int = 0) -> str:
    """Return a line of a text between its neighbours, with their numbers; long lines are cut around the column.

    number, column: counted from 1. A caret is printed below the column; 0 is no column.
    """
    near = range(max(number - 1, 1), min(number + 1, len(lines)) + 1)
    texts = ["".join(each if each.isprintable() else " " for each in lines[at - 1].rstrip()) for at in near]
    start = max(column - 1 - WIDTH // 2, 0) if max(map(len, texts)) > WIDTH else 0
    shown = []
    for at, text in zip(near, texts, strict=True):
        cut = ("..." if start else "") + text[start : start + WIDTH] + ("..." if len(text) > start + WIDTH else "")
        shown.append(f"  {'>' if at == number else ' '} {at:5d} | {cut}".rstrip())
        if at == number and column:
            shown.append(f"{'|':>11} {'^':>{column - start + 3 * bool(start)}}")
    return "\n".join(shown)
