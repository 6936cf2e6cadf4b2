"""The script of sizes counts files, code lines and docstring lines."""

from tests.architecture.sizes import code_lines, docstring_lines, percentile, public_functions
from tests.architecture.source import Source

TEXT = '''"""Module.

More."""
import os
from package import (
    name,
)

# A comment.
X = 1  # a comment after code
"""About X."""


class Public:
    def method(self):
        """One line."""

        def inner():
            return """a
            text"""


class _Private:
    def method(self): ...


def function():
    """Two
    lines."""
'''


def test_code_lines_exclude_docstrings_imports_blanks_and_comments() -> None:
    assert code_lines(Source("file.py", TEXT)) == {10, 14, 15, 18, 19, 20, 23, 24, 27}


def test_docstring_lines_are_those_of_public_functions() -> None:
    counts = {function.name: docstring_lines(function) for function in public_functions(Source("file.py", TEXT))}
    assert counts == {"method": 1, "function": 2}


def test_nine_in_ten_values_are_at_most_the_percentile() -> None:
    assert percentile(range(1, 21)) == 18
