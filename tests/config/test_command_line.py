"""The tools' parsers answer a wrong command line with one line and status 2."""

import argparse
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megapipe
from megapipe.config.command_line import finite, natural, positive, tool_parser
from megapipe.config.field_types import whole_number


def parser() -> argparse.ArgumentParser:
    made = tool_parser("tool.py", "About it.", "examples: tool.py count --times 3")
    count = made.add_subparsers(dest="command", required=True).add_parser("count")
    count.add_argument("--times", type=positive)
    count.add_argument("--skip", type=natural)
    count.add_argument("--within", type=finite)
    count.add_argument("--port", type=whole_number)
    count.add_argument("--kind", choices=["small", "large"])
    return made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: command (tool.py --help"),
        ("weigh", "invalid choice: 'weigh' (choose from"),
        ("count --times 0", "--times is 0, but must be at least 1 (tool.py count --help lists the options)"),
        ("count --times many", "--times is 'many', but must be a whole number"),
        ("count --skip=-1", "--skip is -1, but must be at least 0"),
        ("count --within=-1", "--within is -1, but must be a finite number of at least 0"),
        ("count --within=inf", "--within is inf, but must be a finite number of at least 0"),
        ("count --within=1e308", "--within is 1e308, but must be a finite number of at least 0 and at most 1e100"),
        ("count --within=near", "--within is 'near', but must be a finite number"),
        ("count --port=1.5", "--port is '1.5', but must be a whole number"),
        ("count --within -1,2", "--within is '-1,2', but must be a finite number"),
        ("count --within -1e3", "--within is -1e3, but must be a finite number of at least 0"),
        ("count --within -near", "--within needs a value; write one that starts with a hyphen as --within=VALUE"),
        ("count --within", "--within needs a value; write one that starts with a hyphen as --within=VALUE"),
        ("count --times \uff12", "--times is '\uff12', but must be a whole number in the digits 0 to 9"),
        ("count --within=1\uff12", "--within is '1\uff12', but must be a finite number in the digits 0 to 9"),
        ("count --port=٣", "--port is '٣', but must be a whole number in the digits 0 to 9"),
        ("count --kind middling", "--kind: invalid choice: 'middling' (choose from"),
        ("count --time 1", "unrecognized arguments: --time 1"),
    ],
)
def test_a_wrong_command_line_is_one_error_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words.split())
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_flags_read_numbers_with_field_types() -> None:
    """Flags whose type is int or float would also take the digits of other scripts."""
    sources = Path(megapipe.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(r"\btype=(int|float)\b", path.read_text(encoding="utf-8"))]


@given(st.integers(0, 10**9), st.floats(0, 1e100))
def test_what_is_right_is_read(count: int, number: float) -> None:
    arguments = parser().parse_args(
        ["count", "--times", f"{count + 1}", "--skip", f"{count}", "--within", f"{number!r}"]
    )
    assert (arguments.times, arguments.skip, arguments.within) == (count + 1, count, number)
