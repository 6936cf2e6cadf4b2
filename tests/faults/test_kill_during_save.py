"""kill -9 at any moment, saves included: the newest checkpoint is whole, and the run goes on undisturbed.

The oracle is the undisturbed run: after the kills losses, weights and moments are its bits.
"""

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import newest_valid
from megapipe.checkpoint.directory import set_aside
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import connected_mesh
from megapipe.training.loop.checkpoints import checkpoint_directory
from tests.checkpoint.disks import CountingDisk, save_on
from tests.checkpoint.runs import assert_same_bits, config_in, run, train
from tests.support.gpt_runs import GPT2_SHAPE, write_shard
from tests.support.ranks import RankError, run_ranks

STEPS_A_LIFE = 6
SIZES = {"pipeline": 2}
OPERATIONS = 150
"""Operations of the disk among which a kill is drawn: about those of one life."""


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
    """Kill one of the ranks `kills` times, at a random moment and at a random operation of its disk by turns.

    snapshot: checkpoint.snapshot of asynchronous saves; None for saves that training waits for.
    """
    chosen = random.Random(seed)
    saves = {"asynchronous": False} if snapshot is None else {"snapshot": snapshot}
    config = config_in(
        tmp_path / "killed",
        write_shard(tmp_path),
        GPT2_SHAPE,
        checkpoint={"every": 1, "keep_last": 2, **saves},
        training={"steps": kills * STEPS_A_LIFE + 1},
        parallel={"pipeline": 2, "data": 1, "timeout_seconds": 20.0},
    )
    directory = checkpoint_directory(config)
    done, interrupted_saves, step = 0, 0, 0
    while done < kills:
        delay = chosen.uniform(0.0, 1.5) if done % 2 else None
        try:
            victim, operation = chosen.randrange(2), chosen.randrange(OPERATIONS)
            run_ranks(2, live, config, victim, delay, operation, may_die={0, 1})
        except RankError:
            pass  # the survivor reports its dead peer
        else:
            continue
        done += 1
        interrupted_saves += bool(list(directory.glob(".step-*.partial")))
        before, step = step, newest_step(config)
        assert step >= before, "a checkpoint was lost"
        assert not set_aside(directory), "a kill left a damaged checkpoint under a step's name"
    assert interrupted_saves > 0
    outcome = run(SIZES, config, step + 1)
    assert outcome.start == step > 0
    whole = replace(config, training=replace(config.training, directory=str(tmp_path / "whole")))
    whole.checkpoint = replace(config.checkpoint, every=None, at_end=False)
    # A checkpoint of this test keeps every loss, so these are the losses of all lives.
    assert_same_bits(outcome, run(SIZES, whole, step + 1))


def live(rank: int, config: PretrainConfig, victim: int, delay: float | None, operation: int) -> None:
    """One life of the job: resume and train until a kill, after `delay` seconds or, without one, at an operation."""
    mesh = connected_mesh(MeshShape(SIZES), torch.device("cpu"), 20.0)
    if rank == victim and delay is not None:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == victim and delay is None:
        save_on(DeadlyDisk(operation), pytest.MonkeyPatch())
    train(mesh, config, newest_step(config) + STEPS_A_LIFE)


def newest_step(config: PretrainConfig) -> int:
    newest = newest_valid(checkpoint_directory(config))
    return 0 if newest is None else int(newest.name.removeprefix("step-"))
