"""Tables, pictures and printed figures of the documentation that code can make.

``make figures`` (``python -m tests.docs.figures [NAME ...]``) writes them, and tests/docs/test_figures.py compares
them with the files. A page marks a table with ``<!-- figure: NAME -->`` and ``<!-- end of figure -->``, and a
function of a module here yields the lines between the two (`table`). Other functions give the cells of rows
(`cells`), the values in a sentence (`sentence`), or whole files (`files`).
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = "<!-- figure: {} -->\n", "\n<!-- end of figure -->"
Tier = Literal["fast", "slow", "exhaustive"]
Rows = Iterable[tuple[str, Sequence[str | None]]]
Made = TypeVar("Made", bound=Callable[[], Any])


@dataclass(frozen=True)
class Figure:
    """One or more files that are made together.

    make: returns the text of each file by its path from the repository's root. tier: when a test compares them.
    """

    name: str
    make: Callable[[], dict[str, str]]
    tier: Tier


FIGURES: dict[str, Figure] = {}
"""All figures by name, after `load`."""


def read(path: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def files(name: str, tier: Tier = "fast") -> Callable[[Made], Made]:
    """Register a function that returns the text of whole files."""
    return _registering(name, tier, lambda make: make())


def table(page: str, name: str, tier: Tier = "fast") -> Callable[[Made], Made]:
    """Register a function that yields the lines between the marks of this name on a page."""
    return _registering(name, tier, lambda lines: {page: _between(read(page), name, "\n".join(lines()))})


def sentence(page: str, name: str, pattern: str) -> Callable[[Made], Made]:
    """Register a function that yields the values of the groups of a pattern, which a page matches exactly once."""
    return _registering(name, "fast", lambda values: {page: _filled(read(page), pattern, list(values()))})


def cells(page: str, name: str) -> Callable[[Made], Made]:
    """Register a function that yields first cells of rows of a page, and the values of the cells after these.

    A cell whose value is None, cells after the values, and other rows are text.
    """

    def make(rows: Made) -> dict[str, str]:
        text = read(page)
        for label, values in rows():
            text = _filled(text, rf"(?m)^\| {re.escape(label)} \|" + r" ([^|\n]*?) ?\|" * len(values), values)
        return {page: text}

    return _registering(name, "fast", make)


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    """Return the first two lines of a Markdown table. An empty first cell makes no gap."""
    return [row(*cells).replace("|  |", "| |"), "|" + "---|" * len(cells)]


def printed(run: Callable[[], object]) -> str:
    """Return what a call prints. A status that it returns must be 0."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert not run()
    return output.getvalue()


def load() -> dict[str, Figure]:
    """Return all figures, in the order of their modules' names."""
    for module in iter_modules(__path__):
        if module.name != "__main__":
            import_module(f"{__name__}.{module.name}")
    return FIGURES


def _registering(name: str, tier: Tier, files_of: Callable[[Made], dict[str, str]]) -> Callable[[Made], Made]:
    def register(function: Made) -> Made:
        assert name not in FIGURES, name
        FIGURES[name] = Figure(name, lambda: files_of(function), tier)
        return function

    return register


def _between(text: str, name: str, inside: str) -> str:
    before, begin, rest = text.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    assert begin, f"no page has {BEGIN.format(name)}"
    assert end, f"no end of figure {name}"
    return before + begin + inside + end + after


def _filled(text: str, pattern: str, values: Sequence[str | None]) -> str:
    (match,) = re.finditer(pattern, text)
    assert match.re.groups == len(values), (pattern, values)
    for group, value in reversed(list(enumerate(values, 1))):
        if value is not None:
            text = text[: match.start(group)] + value + text[match.end(group) :]
    return text
