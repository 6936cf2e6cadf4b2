"""Limits on size, and on code that asks for a model's family."""

import re

from tests.architecture.sizes import function_lines, functions
from tests.architecture.source import product

FILE_LINES = 700
FUNCTION_LINES = 92
"""Lines of the longest function today."""
FAMILY_CHECKS = 24
"""`isinstance` with a class of one family, outside spec/ and models/, where families are known. May only go down."""


def test_no_file_is_too_long() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in product()}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{source.path}:{function.lineno}": function_lines(function)
        for source in product()
        for function in functions(source)
    }
    assert {place: lines for place, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_no_more_code_asks_for_a_family_than_before() -> None:
    """A family is a row of the model table; code that needs a property of it reads that property."""
    outside = [source for source in product() if source.package not in ("megapipe/spec", "megapipe/models")]
    checks = [
        (source.path, check)
        for source in outside
        for check in re.findall(r"isinstance\([^()]*(?:Bert|Gpt|GPT)\w*", source.text)
    ]
    assert len(checks) <= FAMILY_CHECKS, checks
