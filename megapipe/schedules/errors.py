"""The exception of the schedules package, and the lines and words of a schedule file that errors point at."""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

WIDTH: Final = 100
"""Maximum number of characters of a line that an excerpt shows."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run.

    The message is one line that names the rule that the schedule breaks and how to fix it. near: the actions around
    the fault, in separate lines; a note of the exception, which tracebacks show.
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


LARGEST: Final = 10**9 - 1
"""The largest number in a schedule file, apart from those of actions."""
DIGITS: Final = "[0-9]+"
"""Pattern of a number. `int` also accepts digits of other scripts, with which a file is easily misread."""


class Word(NamedTuple):
    """A word and its column, counted from 1. line: number of its line if its row has several lines and this is not the
    first."""

    text: str
    column: int
    line: int = 0


class TextLine(NamedTuple):
    """A line that has words: its number from 1, its words, its text without the comment, and all lines of the file."""

    source: str
    number: int
    words: tuple[Word, ...]
    text: str
    file: tuple[str, ...]

    def error(self, word: Word, problem: str) -> ScheduleError:
        """Return an error at a word of this line."""
        number = word.line or self.number
        place = f"{self.source}, line {number}, column {word.column}"
        return ScheduleError(f"{place}: {problem}", excerpt(self.file, number, word.column))

    def expect_length(self, length: int) -> None:
        """Raise ScheduleError unless the line has that many words."""
        if len(self.words) > length:
            raise self.error(self.words[length], f"unexpected {self.words[length].text!r}; remove it")
        if len(self.words) < length:
            raise self.error(self.words[-1], f"a value must follow {self.words[0].text!r}")

    def number_at(self, index: int, least: int = 0) -> int:
        """Return the whole number at a word; raises ScheduleError unless it is from ``least`` to `LARGEST`."""
        if index >= len(self.words):
            raise self.error(self.words[-1], f"a number must follow {self.words[-1].text!r}")
        word = self.words[index]
        return self.whole_number(word, word.text, least)

    def whole_number(self, word: Word, text: str, least: int = 0) -> int:
        """Return the whole number of a text, which is a word of this line or a part of it; raises as `number_at`."""
        digits = text.lstrip("0") or text[-1:]
        if re.fullmatch(DIGITS, text) and len(digits) <= len(str(LARGEST)) and int(digits) >= least:
            return int(digits)
        rule = f"a whole number from {least} to {LARGEST:,}"
        raise self.error(word, f"{text!r} is not {rule}; write one, in the digits 0 to 9")

    def choice_at(self, index: int, choices: tuple[str, ...]) -> str:
        """Return the word at an index, which must be one of ``choices``."""
        self.expect_length(index + 1)
        return self.one_of(index, choices)

    def one_of(self, index: int, choices: tuple[str, ...]) -> str:
        """Return the word at an index, which must be one of ``choices``; others may follow."""
        if index >= len(self.words):
            raise self.error(self.words[-1], f"one of {', '.join(choices)} must follow {self.words[-1].text!r}")
        word = self.words[index]
        if word.text not in choices:
            raise self.error(word, f"{word.text!r} is not one of {', '.join(choices)}")
        return word.text


def split_lines(text: str, source: str) -> Iterator[TextLine]:
    """Yield the lines that hold more than a comment."""
    file = tuple(text.split("\n"))
    for number, raw in enumerate(file, start=1):
        content = raw.split("#", 1)[0].rstrip()
        words = tuple(Word(match.group(), match.start() + 1) for match in re.finditer(r"\S+", content))
        if words:
            yield TextLine(source, number, words, content.strip(), file)
