"""Predictions, searches and dry runs give the answers that are stored, to the byte."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.answers import answer, requests, stored

SHOWN = 5
"""Differences that a failure shows."""


def chosen() -> Iterator[Any]:
    """Every request; those of the fast tier are few."""
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    for number, arguments in enumerate(requests()):
        if arguments[0] == "predict":
            marks = [] if number % 15 == 0 else [slow] if number % 9 == 0 else [exhaustive]
        else:
            marks = [slow] if number % 10 == 0 and arguments[0] == "search" else [exhaustive]
        yield pytest.param(number, arguments, marks=marks, id=f"{number}-{arguments[0]}")


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Paths in an answer with the old and the new value. Of floats the last digits may differ by the order of sums."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > 1e-9 * abs(old):
            yield f"{path}: {old!r} before, {new!r} now"
    elif old != new:
        yield f"{path}: {old!r} before, {new!r} now"


@pytest.mark.parametrize(("number", "arguments"), list(chosen()))
def test_an_answer_is_the_one_that_is_stored(number: int, arguments: list[str]) -> None:
    changes = list(differences(stored()[number], answer(arguments)))
    assert not changes, "\n".join([" ".join(arguments), *changes[:SHOWN]])
