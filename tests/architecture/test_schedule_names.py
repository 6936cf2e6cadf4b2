"""Code outside the generators asks a generator for its properties, and does not know it by name."""

import ast
import re
from collections.abc import Iterator

from megapipe.schedules.registry import GENERATORS
from tests.architecture.source import Source, product

GENERATOR_FILES = "megapipe/schedules/generators/"

STILL_NAMED = {"megapipe/config/parallel.py": "the default"}
"""Files that know a schedule by name, and why. Nothing may be added."""


def test_no_other_file_knows_a_schedule_by_name() -> None:
    names_by_file = {source.path: sorted(set(names_in(source))) for source in product()}
    assert {path: names for path, names in names_by_file.items() if names and path not in STILL_NAMED} == {}


def names_in(source: Source) -> Iterator[str]:
    """Yield names of schedules in code: whole strings, or items of lists with commas, and identifiers."""
    if source.path.startswith(GENERATOR_FILES) or not re.search("|".join(GENERATORS), source.text):
        return
    for node in ast.walk(source.tree):
        words: list[object] = [getattr(node, "id", ""), getattr(node, "name", ""), getattr(node, "attr", "")]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [word.strip() for word in node.value.split(",")]
        yield from (str(word).strip("_") for word in words if str(word).strip("_") in GENERATORS)
