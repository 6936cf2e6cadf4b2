"""Saves in the background: what lands on disk is the copied step's state, whole, whatever happens meanwhile.

The same states saved by `save`, between two steps, are the oracle; disks that die and refuse are those of its tests.
"""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import CheckpointError, background, newest_valid
from megapipe.checkpoint.background import BackgroundSaver
from megapipe.checkpoint.directory import keep_last, set_aside
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.parallel.mesh import Mesh
from megapipe.training.flags import any_rank
from tests.checkpoint.disks import CountingDisk, Killed, KilledDisk, RefusingDisk
from tests.checkpoint.test_crash import check_whole, fresh
from tests.checkpoint.toy import ALONE, Layout, alone, fill, load_step, make_states, run_state, save_step
from tests.support.meshes import run_threads
from tests.support.patience import wait_until
from tests.support.ranks import run_ranks

PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])
QUAD = Layout({"data": 2, "tensor": 2}, [["table", "one", "two"]])


class HeldDisk(StorageWriter):
    """A disk that stands still before its first write until it is let go."""

    def __init__(self) -> None:
        self.writing = threading.Event()
        self.released = threading.Event()

    def write(self, descriptor: int, content: memoryview) -> int:
        self.writing.set()
        assert self.released.wait(30)
        return super().write(descriptor, content)


def start(saver: BackgroundSaver, mesh: Mesh, layout: Layout, step: int) -> None:
    """Save the known values of a step, and overwrite them as soon as training may."""
    states = make_states(mesh, layout)
    fill(states, step)
    saver.start(states, {state.name: step for state in states}, run_state(step))
    for state in states:
        for buffer in (*state.weights, *state.moments.values()):
            buffer.fill_(torch.nan)


def saved(mesh: Mesh, layout: Layout, directory: Path, *wanted: int, storage: StorageWriter = DISK) -> list[int]:
    """Save steps without waiting between them, deleting what is older than the last two, and wait for the last; the
    steps that have ended."""
    saver = BackgroundSaver(
        directory, mesh, storage=storage, after=lambda: keep_last(directory, 2, storage, keep_every=3)
    )
    for step in wanted:
        start(saver, mesh, layout, step)
    saver.finish()
    return [ended.step for ended in saver.poll()]


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", [ALONE, PAIR, QUAD], ids=["alone", "pair", "quad"])
def test_the_files_are_those_of_a_save_between_steps(tmp_path: Path, layout: Layout) -> None:
    run_threads(layout.sizes, saved, layout, tmp_path / "beside", 5)
    run_threads(layout.sizes, save_step, layout, tmp_path / "between", 5)
    found = everything(tmp_path / "beside/step-00000005")
    assert found == everything(tmp_path / "between/step-00000005")
    run_threads(layout.sizes, load_step, layout, tmp_path / "beside/step-00000005", 5)
    assert [path.name for path in (tmp_path / "beside").iterdir()] == ["step-00000005"]


def test_training_goes_on_while_the_disk_stands_still(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = BackgroundSaver(tmp_path, alone(), storage=disk)
    start(saver, alone(), ALONE, 1)
    assert disk.writing.wait(30)
    assert saver.under_way
    assert saver.poll() == []
    assert newest_valid(tmp_path) is None
    memory = saver._snapshot.num_bytes
    disk.released.set()
    saver.finish()
    (ended,) = saver.poll()
    assert (ended.step, ended.path, ended.error) == (1, tmp_path / "step-00000001", None)
    assert saver.poll() == [], "it is told once"
    start(saver, alone(), ALONE, 2)
    saver.finish()
    assert saver._snapshot.num_bytes == memory, "the second copy takes the first one's memory"


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = BackgroundSaver(tmp_path, alone(), storage=disk)
    start(saver, alone(), ALONE, 1)
    second = threading.Thread(target=start, args=(saver, alone(), ALONE, 2))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert not list(tmp_path.glob("*00000002*"))
    disk.released.set()
    second.join(30)
    saver.finish()
    assert [ended.step for ended in saver.poll()] == [1, 2]
    for step in (1, 2):
        load_step(alone(), ALONE, tmp_path / f"step-{step:08d}", step)


def leave_while_the_disk_stands_still(rank: int, directory: Path) -> bool:
    disk = HeldDisk()
    saver = BackgroundSaver(directory, alone(), storage=disk)
    start(saver, alone(), ALONE, 2)
    return disk.writing.wait(30) and saver.under_way


def test_a_process_that_ends_meanwhile_leaves_the_one_before(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    assert run_ranks(1, leave_while_the_disk_stands_still, tmp_path) == [True]
    assert list(tmp_path.glob(".step-00000002.partial/*"))
    assert check_whole(tmp_path) == 1


def test_killed_at_every_operation_of_two_saves_in_a_row(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path / "template", 1)
    counted = CountingDisk()
    saved(alone(), ALONE, fresh(tmp_path / "counted", tmp_path / "template"), 2, 4, storage=counted)
    found = []
    for at in range(len(counted.operations)):
        directory = fresh(tmp_path / "run", tmp_path / "template")
        with pytest.raises((Killed, CheckpointError)):
            saved(alone(), ALONE, directory, 2, 4, storage=KilledDisk(at, after=True))
        found.append(newest_step(directory))
        assert not set_aside(directory)
    assert found == sorted(found)
    assert set(found) == {1, 2, 4}
    assert counted.operations.count("rename") == 3, "two saves and a deletion"


def newest_step(directory: Path) -> int:
    newest = newest_valid(directory)
    assert newest is not None
    step = int(newest.name.removeprefix("step-"))
    load_step(alone(), ALONE, newest, step)
    return step


def saved_with(mesh: Mesh, directory: Path, victim: int, disk: StorageWriter, patience: float) -> None:
    saver = BackgroundSaver(directory, mesh, storage=disk if mesh.rank == victim else DISK, patience=patience)
    start(saver, mesh, PAIR, 2)
    try:
        saver.finish()
    finally:
        saver.abandon(30.0)  # a thread that outlives its test would discard the folders of the next one


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_one_of_two_ranks_killed_at_every_operation(tmp_path: Path, victim: int) -> None:
    template, counted = tmp_path / "template", CountingDisk()
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    run_threads(PAIR.sizes, saved_with, fresh(tmp_path / "counted", template), victim, counted, 30.0)
    # Rank 0 waits for as long for the share of a rank that is dead, and of one that writes slowly.
    patience = 30.0 if victim == 0 else 1.0
    found = []
    for at in range(len(counted.operations)):
        directory = fresh(tmp_path / "run", template)
        with pytest.raises(Killed):
            run_threads(PAIR.sizes, saved_with, directory, victim, KilledDisk(at, after=True), patience)
        found.append(check_whole(directory))
    assert len(found) > 10
    assert found[0] == 1
    # Rank 1's last operation names its record, which is all that rank 0 waits for.
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_full_disk_is_told_on_every_rank_and_the_next_save_works(tmp_path: Path, victim: int, at: int) -> None:
    run_threads(PAIR.sizes, save_step, PAIR, tmp_path, 1)
    told = run_threads(PAIR.sizes, failing_then_working, tmp_path, victim, at)
    assert told[0] == told[1]
    assert "No space left" in told[0]
    assert f"(rank {victim}, on" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000003", 3)


def failing_then_working(mesh: Mesh, directory: Path, victim: int, at: int) -> str:
    disk = RefusingDisk(at, errno.ENOSPC) if mesh.rank == victim else DISK
    saver = BackgroundSaver(directory, mesh, storage=disk, patience=30.0)
    start(saver, mesh, PAIR, 2)
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    start(saver, mesh, PAIR, 3)
    saver.finish()
    return str(raised.value)


class FullDisk(StorageWriter):
    """Takes nothing at all: no byte, no file, no name."""

    def create(self, path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rename(self, source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told_in_memory(mesh: Mesh, directory: Path, victim: int) -> tuple[bool, str, float]:
    """Whether the rank has a failure to report, what all then know, and how long that took."""
    disk = FullDisk() if mesh.rank == victim else DISK
    saver = BackgroundSaver(directory, mesh, storage=disk, patience=1000.0)
    start(saver, mesh, PAIR, 2)
    if mesh.rank == victim:
        wait_until(lambda: saver.failed)
    failed = any_rank(mesh, saver.failed)
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    seconds = time.monotonic() - begun
    saver.finish()  # it is raised once
    assert not saver.failed
    return failed, str(raised.value), seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_rank_is_reported_without_the_disk(tmp_path: Path, victim: int) -> None:
    ranks = run_threads(PAIR.sizes, told_in_memory, tmp_path, victim)
    assert {(failed, told) for failed, told, _ in ranks} == {(True, ranks[0][1])}
    assert "No space left on device" in ranks[0][1]
    assert f"(rank {victim}, on" in ranks[0][1]
    assert max(seconds for *_, seconds in ranks) < 20.0, "rank 0's patience is 1000 s"
    assert not list(tmp_path.iterdir()), "what was written is removed"


class LateDisk(StorageWriter):
    """Creates its first file while rank 0, whose disk this is not, already removes the folder."""

    def __init__(self) -> None:
        self.removing, self.created = threading.Event(), threading.Event()

    def create(self, path: Path) -> int:
        assert self.removing.wait(30)
        descriptor = super().create(path)
        self.created.set()
        return descriptor


class RemovingDisk(FullDisk):
    def __init__(self, other: LateDisk) -> None:
        self.other = other

    def remove_folder(self, path: Path) -> None:
        self.other.removing.set()
        assert self.other.created.wait(30)
        super().remove_folder(path)


def failing_while_another_rank_writes(mesh: Mesh, directory: Path, late: LateDisk) -> None:
    saver = BackgroundSaver(directory, mesh, storage=late if mesh.rank else RemovingDisk(late))
    start(saver, mesh, PAIR, 2)
    with pytest.raises(CheckpointError):
        saver.finish()


def test_files_written_during_the_removal_are_removed_too(tmp_path: Path) -> None:
    run_threads(PAIR.sizes, failing_while_another_rank_writes, tmp_path, LateDisk())
    assert not list(tmp_path.iterdir())


def slow_on_one_rank(mesh: Mesh, directory: Path, holder: HeldDisk) -> None:
    saver = BackgroundSaver(directory, mesh, storage=holder if mesh.rank else DISK)
    start(saver, mesh, PAIR, 2)
    if mesh.rank:
        threading.Timer(2.0, holder.released.set).start()
    saver.finish()


def test_a_disk_slower_than_a_collective_waits_loses_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LONGEST_SLICE", 0.05)
    run_threads(PAIR.sizes, slow_on_one_rank, tmp_path, HeldDisk(), timeout=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_takes_too_long_is_given_up_and_leaves_the_one_before(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    disk = HeldDisk()
    saver = BackgroundSaver(tmp_path, alone(), storage=disk)
    start(saver, alone(), ALONE, 2)
    with pytest.raises(CheckpointError, match=r"after step 2 was given up: .*older checkpoints are untouched"):
        saver.finish(within=0.01)
    disk.released.set()
    saver.abandon(30.0)
    assert newest_step(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def waiting(mesh: Mesh, directory: Path, holder: HeldDisk) -> str:
    saver = BackgroundSaver(directory, mesh, storage=holder if mesh.rank else DISK, patience=0.05)
    start(saver, mesh, PAIR, 2)
    if mesh.rank == 0:
        while saver.under_way:
            threading.Event().wait(0.005)
        holder.released.set()
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    return str(raised.value)


def test_a_rank_that_writes_nothing_is_named(tmp_path: Path) -> None:
    told = run_threads(PAIR.sizes, waiting, tmp_path, HeldDisk())
    assert told[0] == told[1]
    assert "rank 1 wrote nothing" in told[0]
    assert not list(tmp_path.glob("step-*"))


def test_a_checkpoint_that_exists_is_refused_at_once(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 2)
    saver = BackgroundSaver(tmp_path, alone())
    with pytest.raises(CheckpointError, match="already exists"):
        start(saver, alone(), ALONE, 2)
    saver.finish()
