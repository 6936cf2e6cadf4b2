"""A save that dies at any operation leaves the last checkpoint or the next one, never a mix and never nothing.

Every operation is enumerated. `Killed` passes all handlers, as SIGKILL does; a disk without power forgets what had not
been flushed.
"""

import shutil
from pathlib import Path

import pytest

from megapipe.checkpoint import newest_valid
from megapipe.checkpoint.directory import keep_last, set_aside, steps
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
    """See that the newest checkpoint is whole, nothing was damaged, and saving works on; returns its step."""
    newest = newest_valid(directory)
    assert newest is not None
    step = int(newest.name.removeprefix("step-"))
    load_step(alone(), ALONE, newest, step)
    assert not set_aside(directory), "a killed save may not leave a damaged checkpoint under a step's name"
    save_step(alone(), ALONE, directory, 3)
    load_step(alone(), ALONE, directory / "step-00000003", 3)
    assert not list(directory.glob(".step-*")), "the next save removes what a killed one left"
    return step


def count(directory: Path) -> int:
    disk = CountingDisk()
    save_step(alone(), ALONE, directory, 2, disk)
    return len(disk.operations)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation_of_a_save(tmp_path: Path, one_saved: Path, after: bool) -> None:
    operations = count(fresh(tmp_path / "counted", one_saved))
    found = []
    for at in range(operations):
        directory = fresh(tmp_path / "run", one_saved)
        with pytest.raises(Killed):
            save_step(alone(), ALONE, directory, 2, KilledDisk(at, after=after))
        found.append(check_whole(directory))
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("loss", ["content", "files", "all"])
def test_power_failure_at_every_operation_of_a_save(tmp_path: Path, one_saved: Path, loss: Loss) -> None:
    for at in range(count(fresh(tmp_path / "counted", one_saved))):
        directory = fresh(tmp_path / "run", one_saved)
        disk = PowerlessDisk(at)
        try:
            save_step(alone(), ALONE, directory, 2, disk)
        except Killed:
            disk.lose(loss)
        check_whole(directory)
    disk = PowerlessDisk(10_000)
    directory = fresh(tmp_path / "run", one_saved)
    save_step(alone(), ALONE, directory, 2, disk)
    disk.lose(loss)
    assert check_whole(directory) == 2, "a save that has returned is durable"


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


def save_with_one_killed(mesh: Mesh, directory: Path, victim: int, at: int) -> None:
    save_step(mesh, PAIR, directory, 2, KilledDisk(at, after=True) if mesh.rank == victim else CountingDisk())


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_at_every_operation(tmp_path: Path, victim: int) -> None:
    template = tmp_path / "template"
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    found: list[int] = []
    at = 0
    while not found or found[-1] == 1:
        directory = fresh(tmp_path / "run", template)
        try:
            run_threads(PAIR.sizes, save_with_one_killed, directory, victim, at)
            break
        except (Killed, CommunicationError):
            found.append(check_whole(directory))
        at += 1
    assert len(found) > 5
    assert found == sorted(found)


def test_killed_at_every_operation_of_a_deletion(tmp_path: Path) -> None:
    template = tmp_path / "template"
    for step in (1, 2):
        save_step(alone(), ALONE, template, step)
    counted = CountingDisk()
    keep_last(fresh(tmp_path / "counted", template), 1, counted)
    assert counted.operations.count("remove") == 2
    for at in range(len(counted.operations)):
        directory = fresh(tmp_path / "run", template)
        with pytest.raises(Killed):
            keep_last(directory, 1, KilledDisk(at, after=True))
        for step, path in steps(directory).items():
            load_step(alone(), ALONE, path, step)
        assert check_whole(directory) == 2
