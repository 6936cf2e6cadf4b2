"""Disks that are full for a while or permanently: no run ends, no rank waits, no checkpoint is lost.

The tests use real file systems in memory if this user may mount them, and injected failures of every write otherwise.
"""

import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint import CheckpointError, newest_valid
from megapipe.checkpoint.storage import StorageWriter
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training import pretrain as program
from megapipe.training.loop.batches import open_samples
from megapipe.training.loop.steps import TrainingLoop
from megapipe.training.observe import records
from megapipe.training.observe.display import PlainLines
from megapipe.training.pretrain import _train, named_recompute
from megapipe.training.resilience.watchdog import Heartbeat
from tests.checkpoint.disks import save_on
from tests.faults.jobs import metrics_of_steps, saved_files, saved_steps
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone
from tests.support.meshes import run_mesh

pytestmark = pytest.mark.usefixtures("without_pictures")

STEPS = 10


def configuration(corpus: str, directory: Path, **checkpoint: Any) -> PretrainConfig:
    return make_config(
        corpus,
        GPT2_SHAPE,
        batch={"global_size": 2},
        checkpoint={"every": 2, **checkpoint},
        training={"steps": STEPS, "log_every": 1, "directory": str(directory)},
        tracking={"tensorboard": True},
    )


class FillingDisk(StorageWriter):
    """A disk that fails with a system error after `room` bytes, until `free` is called."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.room = room
        self._error = error
        self.full = False

    def free(self) -> None:
        self.room, self.full = 1 << 60, False

    def take(self, size: int) -> None:
        """Use `size` bytes, or raise like the system."""
        self.full |= size > self.room
        self.room -= size
        if self.full:
            raise OSError(self._error, os.strerror(self._error))

    def make_folder(self, path: Path) -> None:
        self.take(64)
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self.take(64)
        return super().create(path)

    def write(self, descriptor: int, content: memoryview) -> int:
        self.take(len(content))
        return super().write(descriptor, content)


@contextmanager
def on_disk(disk: FillingDisk, at_step: Callable[[int], None]) -> Iterator[None]:
    """Redirect saves and all files of lines to a disk. at_step: called after each step with its number."""
    with pytest.MonkeyPatch.context() as patched:
        write, report = records.LineFile.write, TrainingLoop._report

        def written(self: records.LineFile, line: str) -> None:
            disk.take(len(line))
            write(self, line)

        def reported(self: TrainingLoop, position: Any, results: Any) -> bool:
            stopped = report(self, position, results)
            if results:
                at_step(position.step)
            return stopped

        patched.setattr(records.LineFile, "write", written)
        patched.setattr(TrainingLoop, "_report", reported)
        save_on(disk, patched)
        yield


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on a disk with enough room, and the bytes that it uses."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    disk = FillingDisk(1 << 40)
    with on_disk(disk, lambda step: None):
        assert train_alone(configuration(corpus, directory)) == 0
    (directory / "taken").write_text(str((1 << 40) - disk.room))
    return directory


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4)),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 20)),
    ],
)
def test_disks_that_fill_at_any_moment_end_no_run(tmp_path: Path, corpus: str, undisturbed: Path, seed: int) -> None:
    """The disk has room again some steps later; the run then saves the same bytes as an undisturbed run."""
    chosen = random.Random(seed)
    error = chosen.choice([errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
    disk = FillingDisk(chosen.randrange(int((undisturbed / "taken").read_text())), error)
    asynchronous, lasts = chosen.random() < 0.5, chosen.randrange(1, 6)
    full_since: list[int] = []

    def at_step(step: int) -> None:
        if disk.full:
            full_since.append(step)
        if disk.full and (step >= full_since[0] + lasts or step == STEPS):
            disk.free()

    config = configuration(corpus, tmp_path / "run", asynchronous=asynchronous, retry_seconds=60.0)
    with pytest.MonkeyPatch.context() as patched, on_disk(disk, at_step):
        patched.setattr("megapipe.training.loop.steps.RETRY_PAUSE_SECONDS", 0.01)
        # For a disk that becomes full in the save at the end, which is tried again.
        freed = threading.Timer(2.0, disk.free)
        freed.start()
        try:
            assert train_alone(config) == 0
        finally:
            freed.cancel()
    assert saved_files(tmp_path / "run", STEPS) == saved_files(undisturbed, STEPS)
    ours, theirs = metrics_of_steps(tmp_path / "run"), metrics_of_steps(undisturbed)
    assert ours.items() <= theirs.items(), "lines may be missing, and those that are there are right"


def test_permanently_full_disks_cost_steps_since_the_last_save(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = FillingDisk(1 << 40)
    with (
        on_disk(disk, lambda step: setattr(disk, "room", 0 if step >= 5 else disk.room)),
        pytest.raises(CheckpointError, match="No space left on device"),
    ):
        train_alone(configuration(corpus, tmp_path, asynchronous=False))
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000004"
    output = capsys.readouterr().out
    assert [f"step {step:>2}/{STEPS} " in output for step in range(1, STEPS + 1)] == [True] * STEPS
    assert output.count("warning: metrics.jsonl failed and is turned off") == 1
    assert output.count("warning: log.txt failed and is turned off") == 1
    assert [output.count(f"warning: no checkpoint after step {step}: ") for step in (6, 8)] == [1, 1]
    assert train_alone(configuration(corpus, tmp_path)) == 0
    assert sorted(metrics_of_steps(tmp_path)) == list(range(1, STEPS + 1))


def train_with_a_full_rank(mesh: Mesh, config: PretrainConfig, victim: int) -> list[str]:
    """Run one rank of a whole run, and return its lines. In steps 3 to 5, the disk of `victim` takes nothing, not even
    a file name."""
    disk, said = FillingDisk(1 << 40), list[str]()
    program.open_display = lambda steps, log_every: PlainLines(steps, log_every, said.append)

    def at_step(step: int) -> None:
        if step == 3:
            disk.room = 0
        elif step == 6:
            disk.free()

    samples = open_samples(config, "train")
    with on_disk(disk, at_step) if mesh.rank == victim else nullcontext():
        assert _train(config, mesh, samples, None, Heartbeat(), None, {}, named_recompute) == 0
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "asynchronous"), [(0, True), (1, True), pytest.param(1, False, marks=pytest.mark.exhaustive)]
)
def test_one_full_rank_delays_no_other(tmp_path: Path, corpus: str, victim: int, asynchronous: bool) -> None:
    config = configuration(corpus, tmp_path, asynchronous=asynchronous, keep_last=None)
    config.parallel = replace(config.parallel, data=2, timeout_seconds=1000.0)
    start = time.monotonic()
    said, _ = run_mesh({"data": 2}, train_with_a_full_rank, config, victim, timeout=300.0)
    assert time.monotonic() - start < 250, "no rank waits for the 1000 s of a collective"
    assert said[-1].startswith(f"finished after step {STEPS}/{STEPS}")
    (warning,) = [line for line in said if "warning: no checkpoint after step 4" in line]
    assert "No space left on device" in warning
    # A background save of step 2 that is still being written when the disk fills is lost with that of step 4.
    assert set(saved_steps(tmp_path)) - {2} == {6, 8, 10}


@contextmanager
def memory_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory at `folder`; skip the test if this user may not."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system in memory: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, how: str) -> None:
    state = os.statvfs(disk)
    if how == "bytes":
        (disk / "filler").write_bytes(bytes(state.f_bavail * state.f_bsize))
        return
    for number in range(state.f_favail):
        (disk / f"filler{number}").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "asynchronous"), [("bytes", True), ("inodes", True), ("inodes", False)])
def test_a_real_disk_that_takes_nothing_for_some_steps(
    tmp_path: Path, corpus: str, undisturbed: Path, how: str, asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with memory_disk(tmp_path / "disk", "size=8m,nr_inodes=200") as disk:

        def at_step(step: int) -> None:
            if step == 3:
                fill(disk, how)
            elif step == 7:
                for path in disk.glob("filler*"):
                    path.unlink()

        with on_disk(FillingDisk(1 << 40), at_step):
            config = configuration(corpus, disk / "run", asynchronous=asynchronous, keep_last=None)
            assert train_alone(config) == 0
        assert saved_steps(disk / "run") == [2, 8, 10]
        assert saved_files(disk / "run", STEPS) == saved_files(undisturbed, STEPS)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint after step 4" in line]
    assert ("No space left on device" if how == "bytes" else "no more files fit there") in warning
