"""The folder of checkpoints: the newest valid one, damaged ones set aside, old ones deleted, one job at a time."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megapipe.checkpoint import CheckpointError, DirectoryLock, newest_valid, newest_whole
from megapipe.checkpoint.directory import keep_last, remove_leftovers, set_aside, steps
from megapipe.checkpoint.manifest import MANIFEST
from megapipe.checkpoint.storage import StorageWriter, explained, free_space
from tests.checkpoint.disks import no_larger_files
from tests.checkpoint.toy import ALONE, alone, save_step

FILE = "rank-00000.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_step(alone(), ALONE, tmp_path, step)
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "manifest"),
        (lambda folder: cut(folder / MANIFEST), "manifest"),
        (lambda folder: (folder / FILE).unlink(), "files"),
        (lambda folder: cut(folder / FILE), "files"),
        (lambda folder: (folder / FILE).write_bytes(b""), "files"),
        (lambda folder: shutil.copy(folder.with_name("step-00000002") / MANIFEST, folder), "step"),
    ],
    ids=["no manifest", "cut manifest", "no file", "cut file", "empty file", "manifest of another step"],
)
def test_a_damaged_checkpoint_is_reported_and_set_aside(
    directory: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(directory / "step-00000003")
    assert newest_whole(directory) == directory / "step-00000002"
    warnings: list[str] = []
    assert newest_valid(directory, warnings.append) == directory / "step-00000002"
    (aside,) = set_aside(directory)
    assert aside.name.startswith(f"step-00000003.bad-{reason}")
    (line,) = warnings
    assert "step-00000003" in line
    assert aside.name in line
    assert list(steps(directory)) == [1, 2]
    # A second damaged checkpoint of this step gets another name.
    save_step(alone(), ALONE, directory, 3)
    damage(directory / "step-00000003")
    newest_valid(directory, warnings.append)
    assert len(set_aside(directory)) == 2


def test_only_folders_named_after_their_step_count(directory: Path) -> None:
    for name in ("step-00000009.bak", "step-9", ".step-00000009.partial", "xstep-00000009"):
        (directory / name).mkdir()
    (directory / "step-00000010").write_text("a file")
    assert newest_valid(directory) == directory / "step-00000003"
    (directory / "step-00000003").rename(directory / "step-00000007")
    assert newest_valid(directory) == directory / "step-00000002"
    assert newest_valid(directory / "nowhere") is None


def test_the_newest_and_every_nth_checkpoint_are_kept(directory: Path) -> None:
    for count, every, kept in ((5, None, [1, 2, 3]), (2, None, [2, 3]), (1, 2, [2, 3]), (1, 4, [3])):
        keep_last(directory, count, keep_every=every)
        assert list(steps(directory)) == kept
    assert [path.name for path in directory.iterdir()] == ["step-00000003"]


def test_a_directory_has_one_job_at_a_time(tmp_path: Path) -> None:
    with no_larger_files(0), pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be written: File too large"):
        DirectoryLock(tmp_path)
    lock = DirectoryLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on .*another training.directory"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_failed_write_is_reported_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert " bytes are free there" in explained(full, tmp_path / "runs" / "new")
    (tmp_path / "file").touch()
    in_the_way = FileExistsError(errno.EEXIST, "File exists")
    assert "file is not a folder: write to another one" in explained(in_the_way, tmp_path / "file")
    # Btrfs reports zero files, of which zero are free.
    state = SimpleNamespace(f_bavail=2, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr("os.statvfs", lambda path: state)
    assert free_space(tmp_path) == "8,192 bytes are free there"
    state.f_files = 1
    assert free_space(tmp_path) == "no more files fit there"


def test_a_new_directory_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(StorageWriter, "flush_folder", lambda disk, path: flushed.append(path))
    for _ in range(2):  # the second time nothing is new
        DirectoryLock(tmp_path / "runs/mine/checkpoints").release()
    assert sorted(flushed) == [tmp_path, tmp_path / "runs", tmp_path / "runs/mine"]


def test_a_dead_jobs_lock_is_free(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        try:
            lock = DirectoryLock(tmp_path)  # noqa: F841  # held until its process is killed
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / ".lock").exists()
    DirectoryLock(tmp_path).release()


def test_a_link_to_another_run_loses_only_the_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for step in (4, 5):
        save_step(alone(), ALONE, other, step)
    before = sorted(path.relative_to(other) for path in other.rglob("*"))
    mine = tmp_path / "mine"
    mine.mkdir()
    save_step(alone(), ALONE, mine, 9)
    (mine / "step-00000004").symlink_to(other / "step-00000004")
    (mine / ".step-00000005.deleted").symlink_to(other / "step-00000005")
    remove_leftovers(StorageWriter(), mine)
    keep_last(mine, 1)
    assert [path.name for path in mine.iterdir()] == ["step-00000009"]
    assert sorted(path.relative_to(other) for path in other.rglob("*")) == before
