"""A save that dies at any operation leaves the last checkpoint or the next one, never a mix and never nothing.

The same for the deletion of what it replaces. Every operation is enumerated. `Killed` passes all handlers, as SIGKILL
does; a disk without power forgets what had not been flushed.
"""

import itertools
import shutil
from pathlib import Path

import pytest

from megapipe.checkpoint import newest_valid
from megapipe.checkpoint.directory import keep_last, set_aside, steps
from megapipe.checkpoint.storage import StorageWriter
from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.disks import CountingDisk, Killed, KilledDisk, Loss, PowerlessDisk
from tests.checkpoint.toy import ALONE, Layout, alone, load_step, save_step
from tests.support.meshes import run_threads

PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])


def fresh(folder: Path, template: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


@pytest.fixture
def one_saved(tmp_path: Path) -> Path:
    """A directory with the checkpoint of step 1."""
    save_step(alone(), ALONE, tmp_path / "template", 1)
    return tmp_path / "template"


def check_whole(directory: Path) -> int:
    """See that every checkpoint is whole and nothing was damaged; returns the newest one's step."""
    newest = newest_valid(directory)
    assert newest is not None
    for step, path in steps(directory).items():
        load_step(alone(), ALONE, path, step)
    assert not set_aside(directory), "a killed save may not leave a damaged checkpoint under a step's name"
    return int(newest.name.removeprefix("step-"))


def check_goes_on(directory: Path) -> int:
    """`check_whole`, and see that the next save works and removes what a killed one left."""
    found = check_whole(directory)
    save_step(alone(), ALONE, directory, 3)
    load_step(alone(), ALONE, directory / "step-00000003", 3)
    assert not list(directory.glob(".step-*"))
    return found


def save_and_delete(mesh: Mesh, layout: Layout, directory: Path, disk: StorageWriter) -> None:
    """Step 2 is saved and step 1, which it replaces, deleted."""
    save_step(mesh, layout, directory, 2, disk)
    if mesh.rank == 0:
        keep_last(directory, 1, disk)


def counted(directory: Path) -> list[str]:
    """The operations of a save and a deletion."""
    disk = CountingDisk()
    save_and_delete(alone(), ALONE, directory, disk)
    return disk.operations


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, one_saved: Path, after: bool) -> None:
    operations = counted(fresh(tmp_path / "counted", one_saved))
    assert operations.count("flush") == 2
    assert operations.count("rename") == 2
    assert operations.count("remove") == 2
    found = []
    for at in range(len(operations)):
        directory = fresh(tmp_path / "run", one_saved)
        with pytest.raises(Killed):
            save_and_delete(alone(), ALONE, directory, KilledDisk(at, after=after))
        found.append(check_goes_on(directory))
    assert found == sorted(found)
    assert set(found) == {1, 2}


def save_with_one_killed(mesh: Mesh, directory: Path, victim: int, at: int, after: bool) -> None:
    save_and_delete(mesh, PAIR, directory, KilledDisk(at, after=after) if mesh.rank == victim else CountingDisk())


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_at_every_operation(tmp_path: Path, victim: int) -> None:
    template = tmp_path / "template"
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    found: list[int] = []
    for at in itertools.count():
        directory = fresh(tmp_path / "run", template)
        try:
            # After half of a write, or else before one: after an operation is before the next one.
            run_threads(PAIR.sizes, save_with_one_killed, directory, victim, at, at % 2 == 0)
            break
        except (Killed, CommunicationError):
            found.append(check_goes_on(directory))
    assert len(found) > 5
    assert found == sorted(found)
    assert set(found) == ({1, 2} if victim == 0 else {1}), "rank 1 ends its part before the checkpoint has its name"


@pytest.mark.parametrize("loss", ["content", pytest.param("files", marks=pytest.mark.exhaustive), "all"])
def test_power_failure_at_every_operation_of_two_ranks(tmp_path: Path, loss: Loss) -> None:
    template = tmp_path / "template"
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    failures = 0
    for at in itertools.count():
        disk, directory = PowerlessDisk(at), fresh(tmp_path / "run", template)
        try:
            run_threads(PAIR.sizes, save_and_delete, PAIR, directory, disk)
        except (Killed, CommunicationError):
            disk.lose(loss)
            check_whole(directory)
            failures += 1
        else:
            disk.lose(loss)
            assert check_whole(directory) == 2, "a save that has returned is durable"
            break
    assert failures > 30


@pytest.mark.parametrize(("disobeys", "loss"), [("flushes", "content"), ("flushes_folders", "files")])
def test_the_power_failures_above_would_show_a_missing_flush(
    tmp_path: Path, one_saved: Path, disobeys: str, loss: Loss
) -> None:
    disk = PowerlessDisk(10_000, **{disobeys: False})
    save_step(alone(), ALONE, one_saved, 2, disk)
    disk.lose(loss)
    newest = newest_valid(one_saved)
    assert newest is not None
    with pytest.raises((AssertionError, ValueError)):
        load_step(alone(), ALONE, newest, 2)


def test_the_power_failures_above_would_show_a_deletion_whose_new_name_was_not_flushed(one_saved: Path) -> None:
    save_step(alone(), ALONE, one_saved, 2)
    renamed = 2
    disk = PowerlessDisk(renamed + 1, flushes_folders=False)
    with pytest.raises(Killed):
        keep_last(one_saved, 1, disk)
    disk.lose("all")
    with pytest.raises(ValueError, match=r"missing|has no"):
        load_step(alone(), ALONE, one_saved / "step-00000001", 1)
