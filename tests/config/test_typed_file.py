"""YAML files of one dataclass: what is read, and what each mistake says."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from megapipe.config import ConfigError
from megapipe.config.field_types import PositiveInt, Share
from megapipe.config.load import read_dataclass, written_dataclass


@dataclass(frozen=True)
class Shelf:
    books: PositiveInt
    full: Share = 1.0


@dataclass(frozen=True)
class Library:
    name: str
    shelves: tuple[Shelf, ...]
    best: Shelf | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[tuple[float, ...], ...] = ()


def read(text: str) -> Library:
    return read_dataclass(Library, text, "library.yaml", 1000)


def test_a_file_is_read_and_written_back() -> None:
    text = "name: 100\nshelves:\n- {books: 3}\n- {books: 4, full: 5e-1}\nlabels: {a: 1.5}\nsizes: [[0, 1e3], [2, 4]]\n"
    library = read(text)
    assert library == Library("100", (Shelf(3), Shelf(4, 0.5)), None, {"a": "1.5"}, ((0.0, 1000.0), (2.0, 4.0)))
    assert read(written_dataclass(library, "a remark")) == library


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("name: x\nshelves: []\n", ["2: shelves is not a list: write one or more `- ` items"]),
        ("name:\nshelves: [{books: 0, full: 2}]\n", [
            "1: name is empty: write a name",
            "2: shelves[0].books is 0, but must be at least 1",
            "2: shelves[0].full is 2, but must be above 0 and at most 1",
        ]),
        ("name: x\nshelves:\n- books: 1\n  boks: 1\nbest: other.yaml\n", [
            "4: shelves[0].boks is an unknown key; did you mean 'books'? (known here: books, full)",
            "5: best is not a mapping: write `key: value` lines",
        ]),
        ("name: x\nshelves: [{class_path: os.system, init_args: {}}]\n", [
            "2: shelves[0].class_path is an unknown key (known here: books, full)",
            "2: shelves[0].init_args is an unknown key (known here: books, full)",
            "2: shelves[0].books is missing; add it",
        ]),
        ("shelves: [{books: 1.5}]\nsizes: [[1, x]]\n", [
            "1: shelves[0].books is 1.5, but must be a whole number of at least 1",
            "2: sizes is a list or mapping, but must be a list of lists of numbers",
            "1: name is missing; add it",
        ]),
    ],
)  # fmt: skip
def test_all_problems_are_reported_with_their_lines(text: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.problems == [f"library.yaml:{problem}" for problem in problems]
