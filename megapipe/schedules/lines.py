"""The lines of a schedule file, and errors that name a place in them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from megapipe.schedules.errors import ScheduleError, excerpt


class Word(NamedTuple):
    """A word and its column, counted from 1. line: of a word that is not on the first line of its row."""

    text: str
    column: int
    line: int = 0


class TextLine(NamedTuple):
    """A line that says something: its number from 1, its words, its text without the comment; all the file's lines."""

    source: str
    number: int
    words: tuple[Word, ...]
    text: str
    file: tuple[str, ...]

    def error(self, word: Word, problem: str) -> ScheduleError:
        """An error at a word of this line."""
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
        """The whole number at a word; raises ScheduleError where there is none or it is below ``least``."""
        if index >= len(self.words):
            raise self.error(self.words[-1], f"a number must follow {self.words[-1].text!r}")
        word = self.words[index]
        if re.fullmatch(r"\d{1,9}", word.text) is None or int(word.text) < least:
            raise self.error(word, f"{word.text!r} is not a whole number of at least {least}")
        return int(word.text)

    def choice_at(self, index: int, choices: tuple[str, ...]) -> str:
        """The word at an index, which must be one of ``choices``."""
        self.expect_length(index + 1)
        return self.one_of(index, choices)

    def one_of(self, index: int, choices: tuple[str, ...]) -> str:
        """The word at an index, which must be one of ``choices``; others may follow."""
        if index >= len(self.words):
            raise self.error(self.words[-1], f"one of {', '.join(choices)} must follow {self.words[-1].text!r}")
        word = self.words[index]
        if word.text not in choices:
            raise self.error(word, f"{word.text!r} is not one of {', '.join(choices)}")
        return word.text


def split_lines(text: str, source: str) -> Iterator[TextLine]:
    """The lines that hold more than a comment."""
    file = tuple(text.split("\n"))
    for number, raw in enumerate(file, start=1):
        content = raw.split("#", 1)[0].rstrip()
        words = tuple(Word(match.group(), match.start() + 1) for match in re.finditer(r"\S+", content))
        if words:
            yield TextLine(source, number, words, content.strip(), file)
