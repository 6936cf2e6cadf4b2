"""Traces and flags that the overlay cannot use, and what it says of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.schedules import build, rank_costs
from megapipe.schedules.command.main import main
from megapipe.schedules.measured.traces import read_rank, write_rank
from tests.schedules.traces import write_trace


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    schedule = build("1f1b", 4, 8)
    write_trace(tmp_path, schedule, rank_costs(schedule.header))
    return tmp_path


def broken(traced: Path, how: str) -> None:
    path = traced / "rank-1.json"
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_text(path.read_text()[:-50])
    elif how == "format":
        path.write_text(json.dumps({"format": "megapipe trace 9"}))
    elif how == "list":
        path.write_text("[]")
    elif how == "field":
        path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "events"}))
    elif how == "event":
        path.write_text(path.read_text().replace('"body"', '"head"', 1))
    elif how == "short event":
        document = json.loads(path.read_text())
        document["events"][3] = document["events"][3][:4]
        path.write_text(json.dumps(document))
    elif how == "run":
        write_rank(traced, replace(read_rank(path), run="another run"))
    elif how == "schedule":
        write_rank(traced, replace(read_rank(path), fingerprint="0123"))
    elif how == "text":
        text = (traced / "schedule.txt").read_text()
        (traced / "schedule.txt").write_text(text.replace("F0.3", "F0.4"))
    elif how == "no text":
        (traced / "schedule.txt").unlink()
    elif how == "position":
        trace = read_rank(path)
        write_rank(traced, replace(trace, events=[trace.events[0]._replace(position=999), *trace.events[1:]]))
    elif how == "empty":
        for each in traced.iterdir():
            each.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "lacks rank-1.json: the run had 4 ranks"),
        ("cut", "rank-1.json is not readable JSON"),
        ("format", "has format 'megapipe trace 9', but this version reads 'megapipe trace 1'"),
        ("list", "has format None"),
        ("field", "rank-1.json lacks 'events'"),
        ("event", "rank-1.json contains an invalid event"),
        ("short event", "rank-1.json contains an invalid event"),
        ("run", "rank-1.json and rank-0.json were recorded in different runs"),
        ("schedule", "rank-1.json and rank-0.json were recorded in different schedules"),
        ("text", "schedule.txt is not the schedule of"),
        ("no text", "cannot read"),
        ("position", "as action 999 of its body, which the schedule 1f1b in the same folder does not have"),
        ("empty", "has no rank-N.json; pass the folder of --profile.trace"),
    ],
)
def test_wrong_files_are_refused(traced: Path, how: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken(traced, how)
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
