"""kill -9 while a save is written beside training, at any operation of the disk or any moment: as in a save between
steps the newest checkpoint is whole, and the run goes on as if nothing had been.

The oracle is the undisturbed run: after the kills losses, weights and moments are its bits.
"""

import os
import random
import signal
import threading
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
from megapipe.training import resume, saving
from tests.checkpoint.runs import assert_same_bits, config_in, run, train
from tests.faults.test_kill_during_save import DeadlyDisk
from tests.support.gpt_runs import GPT2_SHAPE, write_shard
from tests.support.ranks import RankError, run_ranks

KILLS = 10
STEPS_A_LIFE = 6
SIZES = {"pipeline": 2}


def live(rank: int, config: PretrainConfig, victim: int, delay: float | None, operation: int) -> None:
    """One life of the job: resume and train until a kill, after `delay` seconds or at an operation of the disk."""
    mesh = connected_mesh(MeshShape(SIZES), torch.device("cpu"), 20.0)
    if rank == victim and delay is not None:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == victim and delay is None:
        saving.BackgroundSaver = partial(saving.BackgroundSaver, storage=DeadlyDisk(operation))
    newest = newest_valid(resume.checkpoint_directory(config))
    start = 0 if newest is None else int(newest.name.removeprefix("step-"))
    train(mesh, config, start + STEPS_A_LIFE)


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    chosen = random.Random(2)
    config = config_in(
        tmp_path / "killed",
        write_shard(tmp_path),
        GPT2_SHAPE,
        checkpoint={"every": 1, "keep_last": 2, "asynchronous": True},
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
    # A checkpoint of this test keeps every loss, so these are the losses of all lives.
    assert_same_bits(outcome, run(SIZES, whole, end))
