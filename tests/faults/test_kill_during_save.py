"""kill -9 at any moment, saves included: the newest checkpoint is whole, and the run goes on as if nothing had
happened."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from megapipe.checkpoint import newest_valid
from megapipe.training.loop import checkpoints
from tests.faults.jobs import LIMIT_SECONDS, RUN, children, needs_proc, saved_steps
from tests.faults.kill_loop import DeadlyDisk, survives
from tests.support.gpt_runs import write_shard
from tests.support.launch import start
from tests.support.patience import wait_until


def save_on(disk: DeadlyDisk) -> None:
    checkpoints.save = partial(checkpoints.save, storage=disk)
    checkpoints.BackgroundSaver = partial(checkpoints.BackgroundSaver, storage=disk)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "seed", "snapshot"),
    [
        pytest.param(30, 0, None, marks=pytest.mark.exhaustive),
        pytest.param(20, 1, "between_steps", marks=pytest.mark.exhaustive),
        (10, 2, "next_step"),
    ],
)
def test_killed_at_random_moments(tmp_path: Path, kills: int, seed: int, snapshot: str | None) -> None:
    survives(tmp_path, kills, seed, snapshot, save_on)


@needs_proc
@pytest.mark.slow
def test_a_killed_job_is_started_again_and_goes_on(tmp_path: Path) -> None:
    chosen = random.Random(1)
    arguments = [
        "--data.prefix",
        write_shard(tmp_path),
        "--training.steps=1000000",
        "--parallel.pipeline=2",
        "--checkpoint.every=1",
    ]
    steps = [0]
    for life in range(3):
        process = start(2, *arguments, folder=tmp_path, errors=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            first = ""
            for line in process.stdout:
                first = line if line.startswith("resumed from") else first
                if line.startswith("step "):
                    break
            assert (f"after step {steps[-1]} " in first) == (life > 0)
            wait_until(lambda: saved_steps(tmp_path / RUN)[-1:] > steps[-1:])  # saves end during training
            time.sleep(chosen.uniform(0.0, 0.5))
        finally:
            # torchrun gives its workers sessions of their own.
            for pid in (process.pid, *children(process.pid).values()):
                with suppress(ProcessLookupError):  # workers end with it
                    os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT_SECONDS)
        newest = newest_valid(tmp_path / RUN / "checkpoints")
        assert newest is not None
        steps.append(int(newest.name.removeprefix("step-")))
        assert steps[-1] > steps[-2]
