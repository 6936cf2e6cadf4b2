"""Traces and flags that the overlay cannot use, and what it says of them."""

import re
from pathlib import Path

import pytest

from megapipe.schedules import build, rank_costs
from megapipe.schedules.command.main import main
from tests.schedules.traces import write_trace


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    schedule = build("1f1b", 4, 8)
    write_trace(tmp_path, schedule, rank_costs(schedule.header))
    return tmp_path


RANK, TEXT = "rank-1.json", "schedule.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (RANK, None, "", "lacks rank-1.json: the run had 4 ranks"),
        (RANK, r".{50}$", "", "rank-1.json is not readable JSON"),
        (RANK, r".*", '{"format": "megapipe trace 9"}', "has format 'megapipe trace 9', but this version reads"),
        (RANK, r".*", "[]", "has format None"),
        (RANK, r'"events":', '"others":', "rank-1.json lacks 'events'"),
        (RANK, r'"body"', '"head"', "rank-1.json contains an invalid event"),
        (RANK, r'(\["body",0,3,"[^"]*"),[^]]*', r"\1", "rank-1.json contains an invalid event"),
        (RANK, r'"a run"', '"another run"', "rank-1.json and rank-0.json were recorded in different runs"),
        (
            RANK,
            r'"fingerprint":"[^"]*"',
            '"fingerprint":"0123"',
            "rank-0.json were recorded in different schedules",
        ),
        (RANK, r'\["body",0,0,', '["body",0,999,', "as action 999 of its body, which the schedule 1f1b in the same f"),
        (TEXT, r"F0\.3", "F0.4", "schedule.txt is not the schedule of"),
        (TEXT, None, "", "cannot read"),
        ("*", None, "", "has no rank-N.json; pass the folder of --profile.trace"),
    ],
)
def test_wrong_files_are_refused(
    traced: Path, file: str, old: str | None, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in traced.glob(file):
        if old is None:
            path.unlink()
            continue
        text, count = re.subn(old, new, path.read_text().rstrip(), count=1, flags=re.DOTALL)
        assert count == 1
        path.write_text(text)
    assert main(["overlay", str(traced)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--step 9", "step 9 was not recorded; the recorded steps are 1, 2, 3"),
        ("--pipeline 1", "pipeline 1 does not exist: the run had 1, numbered from 0"),
        ("--output overlay.png", "must end in .html, .svg, .json"),
        ("--output /nowhere/overlay.svg", "cannot write"),
        ("--latency -1", "--latency is -1; it must be at least 0"),
        ("--latency nan", "--latency is nan; it must be at least 0 and finite"),
        ("--forward inf --json", "--forward is inf; it must be at least 0 and finite"),
        ("--forward 0 --backward 0", "--forward is 0; it must be above 0"),
    ],
)
def test_wrong_flags_are_refused(traced: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlay", str(traced), *flags.split()]) == 2
    shown, error = capsys.readouterr()
    assert message in error
    assert not shown


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlay", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
