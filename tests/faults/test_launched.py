"""Faults of whole processes under torchrun: the named rank, the exit status, no leftovers, and the resumed run."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from megapipe.training.resilience.signals import ExitCode
from tests.faults.jobs import (
    LIMIT_SECONDS,
    assert_same_run,
    children,
    children_of,
    endless_job,
    needs_proc,
    saved_steps,
    wait_for_the_end,
)
from tests.support.gpt_runs import write_shard
from tests.support.launch import command, environment, launch, start
from tests.support.patience import wait_until
from tests.training.records import events

pytestmark = [pytest.mark.slow, needs_proc]

STEPS = 12


def test_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    with endless_job(tmp_path, "--parallel.pipeline=2") as (process, workers):
        watchers = [pid for worker in workers.values() for pid in children_of(worker)]
        assert len(workers) == len(watchers) == 2
        os.kill(process.pid, signal.SIGKILL)
        wait_for_the_end([*workers.values(), *watchers])


def test_watchdogs_name_a_stopped_rank_and_end_the_job(tmp_path: Path) -> None:
    """Each watcher is stopped while the other one reports, because the first of them to end its rank ends the job."""
    watchdog = ["--watchdog.floor_seconds=5", "--watchdog.factor=20"]
    with endless_job(tmp_path, "--parallel.pipeline=2", *watchdog) as (process, workers):
        watchers = {rank: children_of(worker)[0] for rank, worker in workers.items()}
        for stopped in (watchers[1], workers[1]):
            os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: "watchdog: rank 0 " in (tmp_path / "errors").read_text(), LIMIT_SECONDS)
        os.kill(watchers[0], signal.SIGSTOP)
        os.kill(watchers[1], signal.SIGCONT)
        wait_until(lambda: "watchdog: rank 1 " in (tmp_path / "errors").read_text(), LIMIT_SECONDS)
        os.kill(watchers[0], signal.SIGCONT)
        assert process.wait(timeout=LIMIT_SECONDS) != 0
        wait_for_the_end([*workers.values()])
    errors = (tmp_path / "errors").read_text()
    reports = {line.split(" made")[0]: line for line in errors.splitlines() if line.startswith("watchdog: ")}
    assert "is stopped by a signal" in reports["watchdog: rank 1"]
    assert "(may wait for rank 1)" in reports["watchdog: rank 0"]
    assert f"exitcode  : {ExitCode.STALLED:d}" in errors
    (stacks,) = (tmp_path / "runs/default/stacks").glob("rank-0-pid-*.txt")
    assert "in _execute" in stacks.read_text()


@pytest.mark.parametrize("whom", ["one rank", "torchrun"])
def test_a_signal_saves_and_ends_all(tmp_path: Path, whom: str) -> None:
    """SIGHUP to one rank; SIGTERM to torchrun."""
    with endless_job(tmp_path, "--parallel.data=2") as (process, workers):
        if whom == "one rank":
            os.kill(workers[1], signal.SIGHUP)
        else:
            os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=LIMIT_SECONDS)
        wait_for_the_end([*workers.values()])
    assert len(list((tmp_path / "runs/default/checkpoints").glob("step-*"))) == 1
    if whom == "one rank":  # torchrun reports the first to end: the rank that was signalled, or the other one
        errors = (tmp_path / "errors").read_text()
        assert f"exitcode  : {ExitCode.HUNG_UP:d}" in errors or f"exitcode  : {ExitCode.INTERRUPTED:d}" in errors


def test_a_reader_that_leaves_costs_nothing(tmp_path: Path) -> None:
    """`| head -5` closes both outputs of two ranks, which still train to the end."""
    arguments = [f"--data.prefix={write_shard(tmp_path)}", "--parallel.data=2", "--training.log_every=1"]
    line = shlex.join(command(2, *arguments, "--training.steps=12")) + " 2>&1 | head -5"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert len(done.stdout.splitlines()) == 5
    run = tmp_path / "runs/default"
    assert saved_steps(run) == [12]
    assert len(events(run, "end")) == 1


def test_killed_ranks_cost_nothing_under_torchrun_restarts(tmp_path: Path) -> None:
    """Twice: each time the ranks that torchrun starts go on from the newest checkpoint by themselves."""
    corpus = write_shard(tmp_path)
    arguments = [f"--data.prefix={corpus}", f"--training.steps={STEPS}", "--training.log_every=1"]
    arguments += ["--parallel.data=2", "--checkpoint.every=3", "--checkpoint.keep_last=1"]
    arguments += ["--checkpoint.asynchronous=false"]  # a save is durable before the next step is printed
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        folder.mkdir()
    with (disturbed / "errors").open("w") as errors:
        process = start(2, *arguments, folder=disturbed, errors=errors.fileno(), PET_MAX_RESTARTS="2")
    assert process.stdout is not None
    kills, resumed = {4: 1, 8: 0}, []
    try:
        for line in process.stdout:
            resumed += [line] if line.startswith("resumed from") else []
            step = int(line.split("/")[0].removeprefix("step ")) if line.startswith("step ") else 0
            if step in kills:
                os.kill(children(process.pid)[kills.pop(step)], signal.SIGKILL)
        assert process.wait(timeout=LIMIT_SECONDS) == 0, (disturbed / "errors").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(resumed) == 2
    undisturbed = launch(2, *arguments, folder=whole)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert_same_run(disturbed / "runs/default", whole / "runs/default", STEPS)
