"""Saves in the background: the files contain the copied step, complete, whatever happens in the meantime.

The oracle is `save` of the same states between two steps.
"""

import errno
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import CheckpointError, background, newest_valid
from megapipe.checkpoint.background import BackgroundSaver, Snapshot, StateSnapshot
from megapipe.checkpoint.directory import keep_last
from megapipe.checkpoint.save_and_load import Content
from megapipe.checkpoint.shards import Extent
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.checkpoint.tensor_file import FileTensor
from megapipe.engine.host_memory import Move, ThreadCopies
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Box
from megapipe.training.loop.steps import any_rank
from tests.checkpoint.disks import KilledDisk
from tests.checkpoint.test_save_and_load import after_kills, check_whole, slow_disk
from tests.checkpoint.toy import ALONE, PAIR, Layout, alone, fill, load_step, make_states, run_state, save_step
from tests.support.meshes import run_threads
from tests.support.patience import wait_until
from tests.support.ranks import run_ranks

QUAD = Layout({"data": 2, "tensor": 2}, [["table", "one", "two"]])


class HeldDisk(StorageWriter):
    """A disk that waits before every write until it is released."""

    def __init__(self) -> None:
        self.writing = threading.Event()
        self.released = threading.Event()

    def write(self, descriptor: int, content: memoryview) -> int:
        self.writing.set()
        assert self.released.wait(30)
        return super().write(descriptor, content)


def start_without_copies(
    saver: BackgroundSaver, mesh: Mesh, layout: Layout, step: int, by_step: bool = True
) -> list[UnitState]:
    """Save the known values of a step, which the next step is to copy, and return them."""
    states = make_states(mesh, layout)
    fill(states, step)
    saver.start(states, {state.name: step for state in states}, run_state(step), by_step=by_step)
    return states


def start(saver: BackgroundSaver, mesh: Mesh, layout: Layout, step: int) -> None:
    """Save the known values of a step, and overwrite them as soon as training may."""
    for state in start_without_copies(saver, mesh, layout, step, by_step=False):
        for buffer in (*state.weights, *state.moments.values()):
            buffer.fill_(torch.nan)


def saved(mesh: Mesh, layout: Layout, directory: Path, *wanted: int, storage: StorageWriter = DISK) -> list[int]:
    """Save steps without a wait between them, keep the last two, and return the steps that have ended."""
    saver = BackgroundSaver(
        directory, mesh, storage=storage, after=lambda: keep_last(directory, 2, storage, keep_every=3)
    )
    for step in wanted:
        start(saver, mesh, layout, step)
    saver.finish()
    return [ended.step for ended in saver.poll()]


@pytest.mark.parametrize("layout", [ALONE, QUAD], ids=["alone", "quad"])
def test_files_equal_those_of_a_save_between_steps(tmp_path: Path, layout: Layout) -> None:
    run_threads(layout.sizes, saved, layout, tmp_path / "background", 5)
    run_threads(layout.sizes, save_step, layout, tmp_path / "between", 5)
    background_files, between = (
        {path.name: path.read_bytes() for path in (tmp_path / folder / "step-00000005").iterdir()}
        for folder in ("background", "between")
    )
    assert background_files == between
    assert [path.name for path in (tmp_path / "background").iterdir()] == ["step-00000005"]


class BlockedCopies(ThreadCopies):
    """Copies that wait until they are released."""

    def __init__(self) -> None:
        super().__init__("snapshot")
        self.released = threading.Event()

    def copy(self, moves: Sequence[Move]) -> None:
        assert self.released.wait(30)
        super().copy(moves)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_each_state_waits_for_its_own_copy(tmp_path: Path, taken: int) -> None:
    """The step starts some of the copies; the last copy is blocked, and the others are made when a state changes."""
    saver = BackgroundSaver(tmp_path, alone())
    states = start_without_copies(saver, alone(), ALONE, 4)
    copies, blocked, free = saver.take_snapshot(), BlockedCopies(), ThreadCopies("snapshot")
    assert copies is not None
    assert saver.take_snapshot() is None
    for state, lane in zip(states[:taken], (free, free, blocked), strict=False):
        copies.start(state, lane)
    for state in states[:2]:
        copies.wait(state)
        state.master.fill_(torch.nan)
    changed = threading.Thread(target=lambda: (copies.wait(states[2]), states[2].master.fill_(torch.nan)))
    changed.start()
    changed.join(0.1)
    assert changed.is_alive() == (taken == 3)
    blocked.released.set()
    changed.join()
    saver.finish()
    load_step(alone(), ALONE, tmp_path / "step-00000004", 4)


def test_a_save_that_no_step_copies_is_whole(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path, alone())
    start_without_copies(saver, alone(), ALONE, 4)
    saver.finish()
    load_step(alone(), ALONE, tmp_path / "step-00000004", 4)
    assert saver.take_snapshot() is None


def test_a_failure_during_a_copy_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    saver, blocked = BackgroundSaver(tmp_path, alone()), BlockedCopies()
    states = start_without_copies(saver, alone(), ALONE, 2)
    copies = saver.take_snapshot()
    assert copies is not None
    for state in states:
        copies.start(state, blocked)
    saver.abandon(0.1)
    blocked.released.set()
    wait_until(lambda: not saver.under_way)
    assert check_whole(tmp_path) == 1


def test_training_continues_while_the_disk_waits(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = BackgroundSaver(tmp_path, alone(), storage=disk)
    start(saver, alone(), ALONE, 1)
    assert disk.writing.wait(30)
    assert saver.under_way
    assert saver.poll() == []
    assert newest_valid(tmp_path) is None
    memory = saver._snapshot.num_bytes
    second = threading.Thread(target=start, args=(saver, alone(), ALONE, 2))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "the second save waits for the first"
    assert not list(tmp_path.glob("*00000002*"))
    disk.released.set()
    second.join(30)
    saver.finish()
    assert [(ended.step, ended.path.name, ended.error) for ended in saver.poll()] == [
        (step, f"step-{step:08d}", None) for step in (1, 2)
    ]
    assert saver.poll() == [], "each end is reported once"
    assert saver._snapshot.num_bytes == memory, "the second copy uses the memory of the first"
    for step in (1, 2):
        load_step(alone(), ALONE, tmp_path / f"step-{step:08d}", step)


def end_while_the_disk_waits(rank: int, directory: Path) -> bool:
    disk = HeldDisk()
    saver = BackgroundSaver(directory, alone(), storage=disk)
    start(saver, alone(), ALONE, 2)
    return disk.writing.wait(30) and saver.under_way


@pytest.mark.exhaustive
def test_a_process_that_ends_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    assert run_ranks(1, end_while_the_disk_waits, tmp_path) == [True]
    assert list(tmp_path.glob(".step-00000002.partial/*"))
    assert check_whole(tmp_path) == 1


def test_killed_at_every_operation_of_two_saves(tmp_path: Path) -> None:
    def save(directory: Path, disk: StorageWriter) -> None:
        saved(alone(), ALONE, directory, 2, 4, storage=disk)

    steps, operations = after_kills(tmp_path, save, True, check_whole)
    assert set(steps) == {1, 2, 4}
    assert operations.count("rename") == 3, "two saves and a deletion"


def saved_with(mesh: Mesh, directory: Path, victim: int, disk: StorageWriter, patience: float = 30.0) -> None:
    """Save step 2; only `victim` has this disk."""
    saver = BackgroundSaver(directory, mesh, storage=disk if mesh.rank == victim else DISK, patience=patience)
    start(saver, mesh, PAIR, 2)
    try:
        saver.finish()
    finally:
        saver.abandon(30.0)  # a thread that outlives its test would remove the folders of the next one


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_one_of_two_ranks_killed_at_every_operation(tmp_path: Path, victim: int) -> None:
    def save(directory: Path, disk: StorageWriter) -> None:
        # Rank 0 waits equally long for a rank that is dead and for one that writes slowly.
        patience = 1.0 if victim == 1 and isinstance(disk, KilledDisk) else 30.0
        run_threads(PAIR.sizes, saved_with, directory, victim, disk, patience)

    # Rank 1's last operation names its record, and rank 0 waits for nothing else.
    steps, operations = after_kills(tmp_path, save, True, check_whole)
    assert len(operations) > 10
    assert steps[0] == 1
    assert set(steps) == {1, 2}


class FullDisk(StorageWriter):
    """Accepts no file and no name until it has space."""

    has_space = False

    def create(self, path: Path) -> int:
        if not self.has_space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def failing_then_working(mesh: Mesh, directory: Path, victim: int) -> tuple[bool, str, float]:
    """Return whether a rank reports a failure, the error on this rank, and the seconds until it was raised."""
    disk = FullDisk() if mesh.rank == victim else DISK
    saver = BackgroundSaver(directory, mesh, storage=disk, patience=1000.0)
    start(saver, mesh, PAIR, 2)
    if mesh.rank == victim:
        wait_until(lambda: saver.failed)
    failed = any_rank(mesh, saver.failed)
    before = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    seconds = time.monotonic() - before
    saver.finish()  # the error is raised once
    assert not saver.failed
    if isinstance(disk, FullDisk):
        disk.has_space = True
    start(saver, mesh, PAIR, 3)
    saver.finish()
    return failed, str(raised.value), seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_report_a_full_disk_and_save_again(tmp_path: Path, victim: int) -> None:
    run_threads(PAIR.sizes, save_step, PAIR, tmp_path, 1)
    ranks = run_threads(PAIR.sizes, failing_then_working, tmp_path, victim)
    assert {(failed, message) for failed, message, _ in ranks} == {(True, ranks[0][1])}
    assert "No space left on device" in ranks[0][1]
    assert f"(rank {victim}, on" in ranks[0][1]
    assert max(seconds for *_, seconds in ranks) < 20.0, "rank 0's patience is 1000 s"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000003", 3)


class LateDisk(StorageWriter):
    """Creates its first file while rank 0, which has another disk, already removes the folder."""

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


def test_files_written_during_the_removal_are_removed(tmp_path: Path) -> None:
    run_threads(PAIR.sizes, failing_while_another_rank_writes, tmp_path, LateDisk())
    assert not list(tmp_path.iterdir())


def test_a_disk_slower_than_a_collective_loses_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LONGEST_SLICE", 0.05)
    run_threads(PAIR.sizes, saved_with, tmp_path, 1, slow_disk(0.8), timeout=0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_save_beyond_its_deadline_is_abandoned(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    disk = HeldDisk()
    saver = BackgroundSaver(tmp_path, alone(), storage=disk)
    start(saver, alone(), ALONE, 2)
    with pytest.raises(CheckpointError, match=r"after step 2 was abandoned: .*older checkpoints are untouched"):
        saver.finish(timeout=0.01)
    disk.released.set()
    saver.abandon(30.0)
    assert check_whole(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def waiting(mesh: Mesh, directory: Path, holder: HeldDisk) -> str:
    saver = BackgroundSaver(directory, mesh, storage=holder if mesh.rank else DISK, patience=0.05)
    start(saver, mesh, PAIR, 2)
    if mesh.rank == 0:
        wait_until(lambda: not saver.under_way)
        holder.released.set()
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    return str(raised.value)


def test_a_rank_that_writes_nothing_is_named(tmp_path: Path) -> None:
    messages = run_threads(PAIR.sizes, waiting, tmp_path, HeldDisk())
    assert messages[0] == messages[1]
    assert "rank 1 wrote nothing" in messages[0]
    assert not list(tmp_path.glob("step-*"))


def test_an_existing_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 2)
    saver = BackgroundSaver(tmp_path, alone())
    with pytest.raises(CheckpointError, match="already exists"):
        start(saver, alone(), ALONE, 2)
    saver.finish()


def contents(*lengths: int) -> list[Content]:
    """Return tensors of these numbers of fp32 elements, each of another value."""
    made = []
    for number, length in enumerate(lengths, start=1):
        extent = Extent.whole(Box((0,), (length,)))
        values = torch.full((length,), float(number))
        made.append(Content(f"{number}", "weights", (length,), extent, FileTensor(f"{number}", (length,), values)))
    return made


def copied(snapshot: Snapshot, given: list[Content]) -> list[Content]:
    """Copy tensors now."""
    copies = snapshot.places(given)
    moves = [(copy.tensor.values, each.tensor.values) for copy, each in zip(copies, given, strict=True)]
    StateSnapshot(copies, {0: moves}).complete()
    return copies


@pytest.mark.parametrize(("prepared", "num_bytes"), [((), 128), ((1,), 128), ((100, 100), 896)])
def test_copies_are_equal_whatever_was_prepared(prepared: tuple[int, ...], num_bytes: int) -> None:
    snapshot, given = Snapshot(pinned=False), contents(3, 7)
    snapshot.prepare(contents(*prepared))
    taken = copied(snapshot, given)
    assert snapshot.num_bytes == num_bytes, "whole cache lines, never two copies"
    for each in given:
        each.tensor.values.fill_(torch.nan)
    assert [(each.tensor.key, each.tensor.values.tolist()) for each in taken] == [("1", [1.0] * 3), ("2", [2.0] * 7)]


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("prepared", [True, False])
def test_copies_cause_few_page_faults(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared copy touches no new page; another one uses huge pages."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if prepared:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif sys.platform != "linux" or not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("the system has no huge pages")
    snapshot, given = Snapshot(pinned=False), contents(1 << 24)
    if prepared:
        snapshot.prepare(given)
        snapshot.settle()
    before = page_faults()
    copied(snapshot, given)
    assert page_faults() - before < (500 if prepared else (64 << 20) / mmap.PAGESIZE / 4)
