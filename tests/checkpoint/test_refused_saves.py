"""A disk that refuses: one clear error on every rank, what was there stays, and the next save works."""

import errno
from pathlib import Path

import pytest

from megapipe.checkpoint import CheckpointError, newest_valid
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.disks import CountingDisk, RefusingDisk
from tests.checkpoint.toy import ALONE, Layout, alone, load_step, save_step
from tests.support.meshes import run_threads

PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])
ERRORS = {
    errno.ENOSPC: "No space left on device.*bytes are free.*Older checkpoints are untouched.*training.directory",
    errno.EIO: "Input/output error",
    errno.EDQUOT: "uota exceeded.*Older checkpoints are untouched",
    errno.EROFS: "Read-only file system.*writable",
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
    disk = RefusingDisk(at, errno.ENOSPC) if mesh.rank == victim else CountingDisk()
    with pytest.raises(CheckpointError) as raised:
        save_step(mesh, PAIR, directory, 2, disk)
    return str(raised.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_tell_of_the_one_whose_disk_is_full(tmp_path: Path, victim: int) -> None:
    run_threads(PAIR.sizes, save_step, PAIR, tmp_path, 1)
    told = set(run_threads(PAIR.sizes, failing_save, tmp_path, victim, 3))
    assert len(told) == 1
    assert f"rank-0000{victim}.safetensors: No space left" in told.pop()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    run_threads(PAIR.sizes, load_step, PAIR, tmp_path / "step-00000001", 1)
