"""The program as a user starts it: plain, under torchrun, on a terminal, stopped by a signal, and wrongly."""

import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import command, environment, launch, launch_with_torchrun, rest_of, start
from tests.training.records import records

RUN = "runs/default"


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        pytest.param(1, [], id="plain", marks=pytest.mark.exhaustive),
        pytest.param(2, ["--parallel.pipeline=2", "--offload.activations=auto", "--offload.memory=1"], id="pipeline"),
        pytest.param(2, ["--parallel.tensor", "2"], id="tensor", marks=pytest.mark.exhaustive),
    ],
)
def test_trains_and_writes_metrics(tmp_path: Path, corpus: str, num_processes: int, layout: list[str]) -> None:
    arguments = ["--data.prefix", corpus, "--training.steps", "4", *layout]
    finished = launch_with_torchrun(num_processes, *arguments, folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "step 4/4 | loss" in finished.stdout
    assert ("offload auto: stage 1: of " in finished.stdout) == ("--offload.activations=auto" in layout)
    start, *steps, waited, saved, end = records(tmp_path / RUN)
    assert [(each["event"], each["step"]) for each in (waited, saved)] == [("save_wait", 4), ("checkpoint", 4)]
    assert start["event"] == "start"
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["consumed_samples"] for record in steps] == [4, 8, 12, 16]
    assert end == {**end, "event": "end", "status": 0}


def test_a_second_run_keeps_the_metrics_of_the_first(tmp_path: Path, corpus: str) -> None:
    for _ in range(2):
        launch(1, "--data.prefix", corpus, "--training.steps", "2", "--checkpoint.at_end=false", folder=tmp_path)
    assert [record.get("event", record["step"]) for record in records(tmp_path / RUN)] == ["start", 1, 2, "end"] * 2


@pytest.mark.parametrize(
    ("schedule", "number"),
    [
        ("1f1b", "SIGTERM"),
        *(pytest.param(schedule, "SIGINT", marks=pytest.mark.exhaustive) for schedule in ("1f1b", "2bw")),
    ],
)
def test_a_signal_stops_and_saves_after_a_whole_step(tmp_path: Path, corpus: str, schedule: str, number: str) -> None:
    arguments = ["--data.prefix", corpus, "--optimizer.decay", "constant", "--checkpoint.every", "100000"]
    arguments += ["--schedule.name", schedule]
    arguments += ["--training.steps", "100000", "--parallel.pipeline", "2"]
    process = start(2, *arguments, folder=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    # A terminal's Ctrl-C reaches the launcher and every rank, and so does the end of a batch job.
    os.killpg(process.pid, signal.Signals[number])
    output = rest_of(process, seconds=120)
    assert f"stopped by {number}" in output
    assert "the same command continues this run" in output
    *_, last_step, saved, end = records(tmp_path / RUN)
    assert end == {**end, "event": "end", "status": 128 + signal.Signals[number], "step": last_step["step"]}
    assert saved == {**saved, "event": "checkpoint", "step": last_step["step"]}
    assert str(saved["path"]) in output.splitlines()[-1]
    done = end["step"]
    assert isinstance(done, int)
    resumed = launch(1, *arguments[:-4], "--training.steps", str(done + 1), folder=tmp_path)
    assert f"after step {done} ({4 * done} samples)" in resumed.stdout
    assert f"finished after step {done + 1}/{done + 1}" in resumed.stdout


@pytest.mark.parametrize(
    ("num_processes", "arguments", "changed", "parts"),
    [
        (2, ["--parallel.pipeline", "3"], {}, ["world size 2", "parallel.pipeline 3", "megapipe train -n 3"]),
        (1, ["--parallel.tensor", "2"], {}, ["world size 1", "megapipe train -n 2"]),
        (1, ["--data.prefix", "nowhere"], {}, ["nowhere"]),
        (1, ["--model.vocabulary_size", "7"], {}, ["vocabulary"]),
        (1, [], {"RANK": "0"}, ["WORLD_SIZE", "torchrun"]),
    ],
)
def test_a_wrong_start_names_the_value_and_the_fix(
    tmp_path: Path,
    corpus: str,
    num_processes: int,
    arguments: list[str],
    changed: dict[str, Any],
    parts: list[str],
) -> None:
    run = ["--data.prefix", corpus, "--training.steps", "1", *arguments]
    finished = launch(num_processes, *run, folder=tmp_path, **changed)
    assert finished.returncode == (2 if num_processes == 1 else 1)  # 1 is torchrun's own
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert errors, finished.stderr
    for part in parts:
        assert part in "\n".join(errors)


RAMPED = ["--training.steps=6", "--batch.global_size=8", "--batch.ramp_start=2", "--batch.ramp_samples=12",
       "--evaluation.every=3", "--evaluation.samples=8", "--checkpoint.every=2", "--data.split=80,20,0",
       "--model.hidden_dropout=0.1", "--tracking.tensorboard=true"]  # fmt: skip


def metrics(folder: Path) -> list[tuple[object, ...]]:
    """Return steps and evaluations of a run's metrics.jsonl, without times."""
    return [
        (record.get("event"), record["step"], record["loss"], record.get("samples"), record.get("gradient_norm"))
        for record in records(folder / RUN)
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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=pytest.mark.exhaustive)])
def test_pipelines_ramp_evaluate_and_resume_like_one_process(tmp_path: Path, corpus: str, schedule: str) -> None:
    """The one process runs on a terminal, where it shows a bar."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    for folder in (alone, split):
        folder.mkdir()
    run = [*RAMPED, f"--schedule.name={schedule}"]
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
