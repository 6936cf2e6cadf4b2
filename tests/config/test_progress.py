"""The progress bar of slow commands: where it appears, and what it shows."""

import itertools
import sys

import pytest

from megapipe.config import command_line
from megapipe.config.command_line import ProgressBar, progress_bar


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second between any two looks at the clock."""
    monkeypatch.setattr(command_line.time, "monotonic", itertools.count().__next__)


def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar("generating", 2500, "tokens", log=True)
    for _ in range(25):
        bar.advance(100)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "generating: 1,000 of 2,500 tokens, 100.0 tokens/s",
        "generating: 2,000 of 2,500 tokens, 100.0 tokens/s",
    ]


def test_a_log_without_lines_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("searching") as report:
        for step in range(25):
            report(step / 25)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("unit", "total", "shown"), [("", 1.0, "50%"), ("bytes", 4e9, "2.0 of 4.0 GB"), ("tokens", 8, "4 of 8 tokens")]
)
def test_a_terminal_shows_the_amount(
    unit: str, total: float, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    bar = ProgressBar("working", total, unit)
    bar.update(0)
    assert bar._bar is None, "nothing appears within the first two seconds"
    for _ in range(3):
        bar.update(total / 2)
    bar.close()
    assert shown in capsys.readouterr().err
