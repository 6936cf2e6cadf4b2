"""A disk that refuses: one clear error on every rank, what was there stays, and the next save works."""

import errno
import itertools
import time
from pathlib import Path

import pytest

from megapipe.checkpoint import CheckpointError, newest_valid
from megapipe.checkpoint.directory import keep_last
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.disks import CountingDisk, RefusingDisk
from tests.checkpoint.test_crash import check_goes_on, fresh
from tests.checkpoint.toy import ALONE, Layout, alone, load_step, save_step
from tests.support.meshes import run_threads

PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])
ERRORS = {
    errno.ENOSPC: "No space left on device.*bytes are free.*write to a larger disk; older files are untouched",
    errno.EIO: "Input/output error",
    errno.EDQUOT: "uota exceeded.*older files are untouched",
    errno.EROFS: "Read-only file system.*writable",
    errno.EFBIG: "File too large",
    errno.EXDEV: "Invalid cross-device link",
}


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_every_operation_of_a_save_refused(tmp_path: Path, error: int) -> None:
    counted = CountingDisk()
    save_step(alone(), ALONE, tmp_path, 1, counted)
    for at in range(len(counted.operations)):
        with pytest.raises(CheckpointError, match=ERRORS[error]) as raised:
            save_step(alone(), ALONE, tmp_path, 10 + at, RefusingDisk(at, error))
        assert str(tmp_path) in str(raised.value)
        assert not list(tmp_path.glob(".step-*")), "what was written is removed"
        newest = newest_valid(tmp_path)
        assert newest is not None
        # The last operation makes the new name durable: by then it is there, and whole.
        assert newest.name == "step-00000001" or at == len(counted.operations) - 1
        load_step(alone(), ALONE, newest, int(newest.name.removeprefix("step-")))


def failing_save(mesh: Mesh, directory: Path, victim: int, at: int) -> str:
    """What this rank raises, empty where there is no such operation."""
    disk = RefusingDisk(at, errno.ENOSPC) if mesh.rank == victim else CountingDisk()
    try:
        save_step(mesh, PAIR, directory, 2, disk)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_tell_of_the_one_whose_disk_is_full(tmp_path: Path, victim: int) -> None:
    run_threads(PAIR.sizes, save_step, PAIR, tmp_path, 1)
    failures = []
    for at in itertools.count():
        told = set(run_threads(PAIR.sizes, failing_save, tmp_path, victim, at))
        assert len(told) == 1, "ranks tell different things"
        failures.append(told.pop())
        if failures[-1] == "":
            break
        assert "No space left on device" in failures[-1]
        assert f"(rank {victim}, on" in failures[-1]
        left = {path.name for path in tmp_path.iterdir()}
        # Rank 0's last operation makes the new name durable: by then it is there, and whole.
        assert left == {"step-00000001"} or (victim == 0 and left == {"step-00000001", "step-00000002"})
        if len(left) == 2:
            run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000002", 2)
            break
    assert sum(f"rank-0000{victim}.safetensors: No space left" in told for told in failures) > 5
    run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000001", 1)


def test_a_deletion_refused_at_any_operation_costs_space_alone(tmp_path: Path) -> None:
    template = tmp_path / "template"
    for step in (1, 2):
        save_step(alone(), ALONE, template, step)
    counted = CountingDisk()
    keep_last(fresh(tmp_path / "run", template), 1, counted)
    for at in range(len(counted.operations)):
        directory = fresh(tmp_path / "run", template)
        with pytest.raises(OSError, match="Input/output"):
            keep_last(directory, 1, RefusingDisk(at, errno.EIO))
        assert check_goes_on(directory) == 2


def test_leftovers_that_cannot_be_removed_do_not_keep_a_run_from_saving(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    left = tmp_path / ".step-00000001.deleted"
    (tmp_path / "step-00000001").rename(left)
    disk = RefusingDisk(0, errno.EBUSY)  # as on NFS while somebody reads the file
    save_step(alone(), ALONE, tmp_path, 2, disk)
    assert disk.operations[0] == "remove"
    assert left.exists()
    load_step(alone(), ALONE, tmp_path / "step-00000002", 2)
    save_step(alone(), ALONE, tmp_path, 3)
    assert not left.exists()


class SlowDisk(StorageWriter):
    """Every flush takes a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def flush(self, descriptor: int) -> None:
        time.sleep(self._seconds)
        super().flush(descriptor)


def slow_save(mesh: Mesh, directory: Path, step: int, seconds: float) -> None:
    save_step(mesh, PAIR, directory, step, SlowDisk(seconds) if mesh.rank == 1 else DISK)


def test_ranks_wait_for_the_slowest_disk_as_long_as_for_any_peer(tmp_path: Path) -> None:
    run_threads(PAIR.sizes, slow_save, tmp_path, 1, 0.1)
    run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000001", 1)
    with pytest.raises(CommunicationError, match="rank 1"):
        run_threads(PAIR.sizes, slow_save, tmp_path, 2, 1.5, timeout=0.5)
    assert check_goes_on(tmp_path) == 1


def save_apart(mesh: Mesh, directory: Path) -> None:
    save_step(mesh, PAIR, directory / f"disk-{mesh.rank}", 1)


def test_ranks_that_do_not_see_one_disk_save_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk-1/.step-00000001.partial").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"disk-0.*rank-00001\.safetensors is missing"):
        run_threads(PAIR.sizes, save_apart, tmp_path)
    assert not list((tmp_path / "disk-0").iterdir())
