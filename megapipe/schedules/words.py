"""Lines and words of the text form, each with its place in the text."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from megapipe.schedules.errors import ScheduleError


class Word(NamedTuple):
    """A word and its column, counted from 1."""

    text: str
    column: int


class TextLine(NamedTuple):
    """A line that says something: its number from 1, its words, its text without the comment."""

    source: str
    number: int
    words: tuple[Word, ...]
    text: str

    def error(self, word: Word, problem: str) -> ScheduleError:
        """An error at a word of this line."""
        return ScheduleError(f"{self.source}, line {self.number}, column {word.column}: {problem}")

    def expect_length(self, length: int) -> None:
        """Raise ScheduleError unless the line has that many words."""
        if len(self.words) > length:
            raise self.error(self.words[length], f"unexpected {self.words[length].text!r}")
        if len(self.words) < length:
            raise self.error(self.words[-1], f"{self.words[0].text!r} needs {length - 1} values")

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
        word = self.words[index]
        if word.text not in choices:
            raise self.error(word, f"{word.text!r} is not one of {', '.join(choices)}")
        return word.text


def split_lines(text: str, source: str) -> Iterator[TextLine]:
    """The lines that hold more than a comment."""
    for number, raw in enumerate(text.split("\n"), start=1):
        content = raw.split("#", 1)[0].rstrip()
        words = tuple(Word(match.group(), match.start() + 1) for match in re.finditer(r"\S+", content))
        if words:
            yield TextLine(source, number, words, content.strip())
