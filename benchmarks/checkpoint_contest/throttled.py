"""Measure the cost of `checkpoint.every auto` on disks of three speeds. The steps and the disk only sleep."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megapipe.checkpoint import RunState
from megapipe.checkpoint.background import BackgroundSaver
from megapipe.checkpoint.frequency import SaveTimer
from megapipe.checkpoint.storage import StorageWriter
from megapipe.config.parallel import MeshShape
from megapipe.parallel.mesh import Mesh

from .state import make_states

SPEEDS = (1000.0, 200.0, 40.0)
"""Speeds of the disks in megabytes per second."""
MATRICES = 2
STEP_SECONDS = 0.05
STEPS_ALONE = 100
"""Number of steps that measure the time of a step without saves."""


class ThrottledDisk(StorageWriter):
    """A disk that writes no faster than `megabytes` a second."""

    def __init__(self, megabytes: float) -> None:
        self._rate = megabytes * 1e6

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write to the disk, then wait until the slower disk would have finished."""
        start = time.perf_counter()
        written = super().write(descriptor, content)
        time.sleep(max(0.0, written / self._rate - (time.perf_counter() - start)))
        return written


@dataclass(frozen=True)
class Overhead:
    """Overhead on a disk of one speed.

    interval: steps between the last two saves. overhead: time that saves added, divided by the training time of the
    steps after the first save. bound: the maximum for `overhead` that was set.
    """

    megabytes_a_second: float
    saves: int
    interval: int
    overhead: float
    bound: float


def overhead(megabytes: float, steps: int, bound: float, folder: Path) -> Overhead:
    """Run `steps` steps that sleep, and save when the timer asks for it. bound: maximum fraction of added time."""
    mesh = Mesh(MeshShape({}), 0, torch.device("cpu"), lambda name, partition: None)
    states = make_states(mesh, MATRICES, 0)
    timer = SaveTimer(bound)
    saved: list[int] = []
    alone = _step_alone()
    lost = taken = 0.0
    with tempfile.TemporaryDirectory(dir=folder) as place:
        saver = BackgroundSaver(Path(place), mesh, storage=ThrottledDisk(megabytes))
        for step in range(1, steps + 1):
            for ended in saver.poll():
                timer.save_ended(ended.seconds if ended.error is None else None)
            is_due = timer.is_due
            start = time.perf_counter()
            time.sleep(STEP_SECONDS)
            seconds = time.perf_counter() - start
            timer.step(seconds)
            if saved:
                taken += alone
                lost += seconds - alone
            if is_due:
                start = time.perf_counter()
                saver.start(states, {}, RunState(step, 0, {}, "fp32", (), {"model": {}}))
                stall = time.perf_counter() - start
                timer.save_started(stall)
                lost += stall if saved else 0.0
                saved.append(step)
        saver.finish()
    interval = saved[-1] - saved[-2] if len(saved) > 1 else steps - saved[0]
    return Overhead(megabytes, len(saved), interval, lost / taken, bound)


def _step_alone() -> float:
    """Return the seconds of a step without saves. It is measured, because a sleep takes longer than requested."""
    start = time.perf_counter()
    for _ in range(STEPS_ALONE):
        time.sleep(STEP_SECONDS)
    return (time.perf_counter() - start) / STEPS_ALONE
