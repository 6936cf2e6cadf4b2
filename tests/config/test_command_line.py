"""The tools' parsers answer a wrong command line with one line and status 2; progress of slow commands appears."""

import argparse
import itertools
import re
import resource
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megapipe
from megapipe.config import ConfigError, command_line
from megapipe.config.command_line import ProgressBar, finite, natural, positive, progress_bar, tool_parser, write_text
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
        ("", "a command is missing; write one of count after tool.py (tool.py --help"),
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
    arguments = parser().parse_args(f"count --times {count + 1} --skip {count} --within {number!r}".split())
    assert (arguments.times, arguments.skip, arguments.within) == (count + 1, count, number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second between any two looks at the clock."""
    monkeypatch.setattr(command_line.time, "monotonic", itertools.count().__next__)


@pytest.mark.usefixtures("clock")
def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar("generating", 2500, "tokens", log=True)
    for _ in range(25):
        bar.advance(100)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "generating: 1,000 of 2,500 tokens, 100.0 tokens/s",
        "generating: 2,000 of 2,500 tokens, 100.0 tokens/s",
    ]


@pytest.mark.usefixtures("clock")
def test_a_log_without_lines_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("searching") as report:
        for step in range(25):
            report(step / 25)
    assert capsys.readouterr().err == ""


def stderr_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("unit", "total", "shown"), [("", 1.0, "50%"), ("bytes", 4e9, "2.0 of 4.0 GB"), ("tokens", 8, "4 of 8 tokens")]
)
@pytest.mark.usefixtures("clock")
def test_a_terminal_shows_the_amount(
    unit: str, total: float, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr_is_a_terminal(monkeypatch)
    bar = ProgressBar("working", total, unit)
    bar.update(0)
    assert bar._bar is None, "nothing appears within the first two seconds"
    for _ in range(3):
        bar.update(total / 2)
    bar.close()
    assert shown in capsys.readouterr().err


def test_a_terminal_shows_work_that_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr_is_a_terminal(monkeypatch)
    monkeypatch.setattr(command_line, "SHOWN_AFTER", 0.01)
    shown, deadline = "", time.monotonic() + 20
    with progress_bar("searching"):
        while "searching" not in shown and time.monotonic() < deadline:
            time.sleep(0.02)
            shown += capsys.readouterr().err
    assert "searching" in shown


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("earlier")
    (tmp_path / "link").symlink_to("file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(ConfigError, match="link cannot be written: File too large"):
            write_text(tmp_path / "link", "later " * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_text() == "earlier"
    write_text(tmp_path / "link", "later")
    assert (tmp_path / "link").is_symlink()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "later", "link": "later"}
