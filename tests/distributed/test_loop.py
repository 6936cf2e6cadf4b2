"""The loop over several ranks, and on a terminal: what one process does, a pipeline that resumes it does too."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import command, environment, launch
from tests.training.records import records

RUN = ["--training.steps=6", "--batch.global_size=8", "--batch.ramp_start=2", "--batch.ramp_samples=12",
       "--evaluation.every=3", "--evaluation.samples=8", "--checkpoint.every=2", "--data.split=80,20,0",
       "--model.hidden_dropout=0.1", "--tracking.tensorboard=true"]  # fmt: skip


def metrics(folder: Path) -> list[tuple[object, ...]]:
    """Return steps and evaluations of a run's metrics.jsonl, without times."""
    return [
        (record.get("event"), record["step"], record["loss"], record.get("samples"), record.get("gradient_norm"))
        for record in records(folder / "runs/default")
        if record.get("event") in (None, "evaluation")
    ]


def run_on_a_terminal(folder: Path, *arguments: str) -> str:
    """Run one process to its end on a terminal, and return what it has written there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(1, *arguments),
        cwd=folder,
        env=environment(TERM="xterm-256color", COLUMNS="120", LINES="40"),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's end of file on a terminal that no process has open
            break
        seen += part
        if not part:
            break
    _, errors = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, errors.decode()
    return seen.decode()


def check_bar(text: str) -> None:
    """A terminal shows progress and losses, and gets its cursor back."""
    for part in ("step 6/6", "tokens/s | MFU", "after step 3: validation loss", "finished after step 6/6"):
        assert part in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "step 6/6 | loss" in text, "losses stay in the scrollback"


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=pytest.mark.exhaustive)])
def test_pipelines_ramp_evaluate_and_resume_like_one_process(tmp_path: Path, corpus: str, schedule: str) -> None:
    """The one process runs on a terminal, where it shows a bar."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    for folder in (alone, split):
        folder.mkdir()
    run = [*RUN, f"--schedule.name={schedule}"]
    check_bar(run_on_a_terminal(alone, f"--data.prefix={corpus}", *run))
    layout = ["--parallel.pipeline=2"]
    started = launch(2, f"--data.prefix={corpus}", *run, *layout, "--training.stop_at=4", folder=split)
    assert started.returncode == 0, started.stderr
    assert started.stdout.count("losses to beat") == 1
    ended = launch(1, f"--data.prefix={corpus}", *run, folder=split)
    assert "resumed from" in ended.stdout
    expected = metrics(alone)
    assert [entry[3] for entry in expected if entry[0] is None] == [2, 2, 4, 6, 8, 8]
    # The first part also evaluates where it stops.
    assert [entry for entry in metrics(split) if entry[:2] != ("evaluation", 4)] == expected
    assert list((split / "runs/default/tensorboard").glob("events.*"))
