"""kill -9 at any moment, saves included: the newest checkpoint is whole, and the run goes on as if nothing had been.

The oracle is the undisturbed run: after thirty kills, losses, weights and moments are its bits.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import newest_valid
from megapipe.checkpoint.directory import set_aside
from megapipe.config.mesh_shape import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import connected_mesh
from megapipe.training import resume
from tests.checkpoint.disks import CountingDisk
from tests.checkpoint.runs import assert_same_bits, config_in, run, train
from tests.faults.test_killed_rank import LIMIT_SECONDS, children
from tests.support.gpt_runs import GPT2_SHAPE, write_shard
from tests.support.launch import command, environment
from tests.support.ranks import RankError, run_ranks

KILLS = 30
STEPS_A_LIFE = 6
SIZES = {"pipeline": 2}


class DeadlyDisk(CountingDisk):
    """Kills its process at one operation, after half of it where it is a write."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        if number == self._at:
            if operation == "write":
                perform()
            os.kill(os.getpid(), signal.SIGKILL)


def live(rank: int, config: PretrainConfig, victim: int, delay: float | None, operation: int) -> bool:
    """One life of the job: resume and train until a kill. Whether this rank reached the end of its steps.

    delay: seconds after which the victim dies; None kills it at a storage operation instead.
    """
    mesh = connected_mesh(MeshShape(SIZES), torch.device("cpu"), 20.0)
    if rank == victim and delay is not None:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == victim and delay is None:
        disk = DeadlyDisk(operation)
        resume.save = partial(resume.save, storage=disk)
    newest = newest_valid(resume.checkpoint_directory(config))
    start = 0 if newest is None else int(newest.name.removeprefix("step-"))
    train(mesh, config, start + STEPS_A_LIFE)
    return True


@pytest.mark.slow
def test_killed_at_thirty_random_moments(tmp_path: Path) -> None:
    chosen = random.Random(0)
    config = config_in(
        tmp_path / "killed",
        write_shard(tmp_path),
        GPT2_SHAPE,
        checkpoint={"every": 1, "keep_last": 2},
        training={"steps": KILLS * STEPS_A_LIFE + 1},
        parallel={"pipeline": 2, "data": 1, "timeout_seconds": 20.0},
    )
    directory = resume.checkpoint_directory(config)
    kills, interrupted_saves, steps = 0, 0, [0]
    while kills < KILLS:
        delay = chosen.uniform(0.0, 1.5) if kills % 2 else None
        try:
            run_ranks(2, live, config, chosen.randrange(2), delay, chosen.randrange(150), may_die={0, 1})
        except RankError:
            pass  # the survivor tells of its dead peer
        else:
            continue
        kills += 1
        interrupted_saves += bool(list(directory.glob(".step-*.partial")))
        newest = newest_valid(directory)
        steps.append(0 if newest is None else int(newest.name.removeprefix("step-")))
        assert steps[-1] >= steps[-2], "a checkpoint was lost"
        assert not set_aside(directory), "a kill left a damaged checkpoint under a step's name"
    assert interrupted_saves > 0
    end = steps[-1] + 1
    outcome = run(SIZES, config, end)
    assert outcome.start == steps[-1] > 0
    whole = replace(config, training=replace(config.training, directory=str(tmp_path / "whole")))
    whole.checkpoint = replace(config.checkpoint, every=None)
    expected = run(SIZES, whole, end)
    # A checkpoint of this test keeps every loss, so these are the losses of all lives.
    assert_same_bits(outcome, expected)


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
        process = subprocess.Popen(
            command(2, *arguments),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            first = ""
            for line in process.stdout:
                first = line if line.startswith("resumed from") else first
                if line.startswith("step "):
                    break
            assert (f"after step {steps[-1]} " in first) == (life > 0)
            time.sleep(chosen.uniform(0.0, 0.5))
        finally:
            # torchrun gives its workers sessions of their own.
            for pid in (process.pid, *children(process.pid).values()):
                os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT_SECONDS)
        newest = newest_valid(tmp_path / "runs/default/checkpoints")
        assert newest is not None
        steps.append(int(newest.name.removeprefix("step-")))
        assert steps[-1] > steps[-2]
