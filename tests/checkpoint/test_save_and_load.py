"""Saves and loads on any layout; after a crash, a refusal or damage, every checkpoint is whole or absent."""

import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    load,
    newest_valid,
    read_manifest,
    save,
)
from megapipe.checkpoint.directory import keep_last, set_aside, steps
from megapipe.checkpoint.shards import WEIGHTS, tiling_problem
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.disks import CountingDisk, Killed, KilledDisk, Loss, PowerlessDisk, RefusingDisk, disk_before
from tests.checkpoint.toy import (
    ALONE,
    MODEL,
    MOMENTS,
    PAIR,
    Layout,
    ToyMoments,
    alone,
    check,
    fill,
    load_step,
    make_states,
    run_state,
    save_step,
)
from tests.support.meshes import run_threads

UNITS = list(MODEL)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any mesh of up to eight ranks; `table` on the first and the last stage, the other units anywhere."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 3] if tensor < 4 else [1, 2]))
    data = draw(st.sampled_from([1, 2, 4] if tensor * pipeline <= 2 else [1, 2] if tensor * pipeline <= 4 else [1]))
    count = draw(st.sampled_from([each for each in (1, 2, 4) if data % each == 0]))
    units: list[list[str]] = [[] for _ in range(pipeline)]
    for unit in UNITS[1:]:
        units[draw(st.integers(0, pipeline - 1))].append(unit)
    for stage in {0, pipeline - 1}:
        units[stage].append("table")
    return Layout(
        {"tensor": tensor, "pipeline": pipeline, "data": data},
        units,
        alignment=draw(st.sampled_from([1, 2, 8])),
        stage=draw(st.integers(1, 3)) if count > 1 else 0,
        count=count,
    )


@given(layouts(), layouts(), st.integers(1, 12))
@settings(max_examples=30)
def test_any_layout_to_any_other(source: Layout, target: Layout, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = run_threads(source.sizes, save_step, source, Path(folder), step)
        assert len(set(paths)) == 1
        run_threads(target.sizes, load_step, target, paths[0], step)
        check_stored_once(paths[0])


def check_stored_once(path: Path) -> None:
    """Check that chunks tile every tensor, and that the files contain only their elements."""
    manifest = read_manifest(path)
    names = {spec.name: spec.shape for specs in MODEL.values() for spec in specs}
    assert manifest.shapes() == names
    stored = 0
    for name, shape in names.items():
        for kind in (WEIGHTS, *MOMENTS):
            chunks = manifest.chunks_of(name, kind)
            assert tiling_problem(shape, [chunk.extent for chunk in chunks]) is None
            stored += sum(chunk.extent.num_elements for chunk in chunks)
    in_files = [tensor for file in manifest.files for tensor in safetensors.torch.load_file(path / file).values()]
    assert sum(tensor.numel() for tensor in in_files) == stored


def test_flushes_reach_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    path = save_step(alone(), ALONE, tmp_path, 1)
    files = [f"{path.parent}/.{path.name}.partial/{file.name}" for file in path.iterdir()]
    assert {*files, f"{path.parent}/.{path.name}.partial", str(path.parent)} <= set(flushed)


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    layout = Layout({"data": 4}, [UNITS])
    path = run_threads(layout.sizes, save_step, layout, tmp_path, 1)[0]
    assert len({chunk.file for chunk in read_manifest(path).chunks}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_weight_versions_are_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    source = Layout({"tensor": 2}, [UNITS], versions=3, dtype=dtype)
    path = run_threads(source.sizes, save_step, source, tmp_path, 5)[0]
    target = Layout(PAIR.sizes, PAIR.units, versions=3, dtype=dtype)
    run_threads(target.sizes, load_step, target, path, 5, 2)
    assert {chunk.dtype for chunk in read_manifest(path).chunks if chunk.kind == WEIGHTS} == {"F32"}
    load_step(alone(), ALONE, path, 5)


def test_additional_versions_and_updates_are_numbered(tmp_path: Path) -> None:
    single = save_step(alone(), ALONE, tmp_path, 6)
    states = make_states(alone(), Layout({}, [UNITS], versions=2))
    load(single, states, {}, alone(), moments=ToyMoments())
    check(states, 6)
    for state in states:
        assert torch.equal(state.weights[0], state.weights[1]), "both are the newest"
    states = make_states(alone(), ALONE)
    load(single, states, {}, alone(), moments=ToyMoments(), updates_per_step=4)
    assert {state.newest for state in states} == {24}


def test_units_without_updates_have_no_moments(tmp_path: Path) -> None:
    states = make_states(alone(), ALONE)
    fill(states, 5, moments=())
    path = save(tmp_path, states, {}, run_state(5), alone())
    fresh_states, applied = make_states(alone(), ALONE), {"one": 7}
    load(path, fresh_states, applied, alone(), moments=ToyMoments())
    assert applied == dict.fromkeys(MODEL, 0)
    assert all(not state.moments for state in fresh_states)


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    path = save_step(alone(), ALONE, tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"not its momentum.*init_from"):
        load(path, make_states(alone(), ALONE), {}, alone(), moments=ToyMoments(("momentum",)))


def error_of_load(mesh: Mesh, layout: Layout, path: Path) -> tuple[type, str, bool]:
    """Return the error that loading raises on this rank, and whether the states are unchanged."""
    states = make_states(mesh, layout)
    fill(states, 3)
    applied = {"one": 3}
    try:
        load(path, states, applied, mesh, moments=ToyMoments())
    except CheckpointError as error:
        check(states, 3)
        return type(error), str(error), applied == {"one": 3}
    raise AssertionError("the damage was not detected")


def test_damage_on_one_rank_changes_no_state(tmp_path: Path) -> None:
    layout = Layout({"pipeline": 2, "tensor": 2}, PAIR.units)
    path = run_threads(layout.sizes, save_step, layout, tmp_path, 5)[0]
    (chunk,) = [each for each in read_manifest(path).chunks if each.name == "two.norm" and each.kind == WEIGHTS]
    content = bytearray((path / chunk.file).read_bytes())
    value = safetensors.torch.load_file(path / chunk.file)[chunk.key]
    content[content.index(value.numpy().tobytes())] ^= 1
    (path / chunk.file).write_bytes(content)
    outcomes = run_threads(layout.sizes, error_of_load, layout, path)
    assert len(set(outcomes)) == 1, "ranks disagree"
    kind, message, unchanged = outcomes[0]
    assert kind is DamagedCheckpointError
    assert all(part in message for part in (chunk.file, "two.norm", "rank 2"))
    assert unchanged


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2, of two files each."""
    for step in (1, 2):
        run_threads(PAIR.sizes, save_step, PAIR, tmp_path, step)
    return tmp_path


def test_no_flipped_bit_changes_loaded_values(directory: Path) -> None:
    path, detected, harmless = directory / "step-00000002", 0, 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for position in range(0, len(content), 29):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            file.write_bytes(damaged)
            try:
                load_step(alone(), ALONE, path, 2)
                harmless += 1
            except CheckpointError:
                detected += 1
        file.write_bytes(content)
    # White space and shapes in a header may change, because nothing depends on them.
    assert detected > 30 * harmless


def test_files_of_another_step_or_rank_are_detected(directory: Path) -> None:
    one, two = (directory / f"step-0000000{step}" for step in (1, 2))
    first, second = sorted(two.glob("*.safetensors"))
    size, other = first.stat().st_size, second.read_bytes()
    for wrong, message in (
        ((one / first.name).read_bytes(), r"rank-00000.safetensors: tensor .* checksum"),
        (other, "rank-00000"),
        (other[:size].ljust(size, b"\0"), "rank-00000"),
    ):
        first.write_bytes(wrong)
        with pytest.raises(DamagedCheckpointError, match=message):
            load_step(alone(), ALONE, two, 2)


def fresh(folder: Path, template: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


def check_whole(directory: Path) -> int:
    """Check that every checkpoint is whole and none was set aside; return the newest one's step."""
    newest = newest_valid(directory)
    assert newest is not None
    for step, path in steps(directory).items():
        load_step(alone(), ALONE, path, step)
    assert not set_aside(directory), "a killed save may not leave a damaged checkpoint under a step's name"
    return int(newest.name.removeprefix("step-"))


def check_continues(directory: Path) -> int:
    """Call `check_whole`, and check that the next save works and removes what a killed one left."""
    step = check_whole(directory)
    save_step(alone(), ALONE, directory, 3)
    load_step(alone(), ALONE, directory / "step-00000003", 3)
    assert not list(directory.glob(".step-*"))
    return step


def save_and_delete(
    mesh: Mesh, layout: Layout, directory: Path, disk: StorageWriter, victim: int | None = None, step: int = 2
) -> None:
    """Save a step and delete the one that it replaces. victim: the only rank on this disk; None for all ranks."""
    own = disk if victim in (None, mesh.rank) else DISK
    save_step(mesh, layout, directory, step, own)
    if mesh.rank == 0:
        keep_last(directory, 1, own)


def after_kills(
    folder: Path, save: Callable[[Path, StorageWriter], object], after: bool | None, check: Callable[[Path], int]
) -> tuple[list[int], list[str]]:
    """Kill a save beside the checkpoint of step 1 at each of its operations, after it or before it, None for each by
    turns. Return the newest steps that are left, and the operations."""
    template, counted, steps = folder / "template", CountingDisk(), []
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    save(fresh(folder / "counted", template), counted)
    for at in range(len(counted.operations)):
        directory = fresh(folder / "run", template)
        disk = KilledDisk(at, after=at % 2 == 0 if after is None else after)
        with pytest.raises((Killed, CheckpointError, CommunicationError)):
            save(directory, disk)
        steps.append(check(directory))
    assert steps == sorted(steps)
    return steps, counted.operations


@pytest.mark.parametrize("after", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, after: bool) -> None:
    def save(directory: Path, disk: StorageWriter) -> None:
        save_and_delete(alone(), ALONE, directory, disk)

    steps, operations = after_kills(tmp_path, save, after, check_continues)
    assert set(steps) == {1, 2}
    assert [operations.count(name) for name in ("flush", "rename", "remove")] == [2, 2, 3]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_one_of_two_ranks_killed_at_every_operation(tmp_path: Path, victim: int) -> None:
    def save(directory: Path, disk: StorageWriter) -> None:
        run_threads(PAIR.sizes, save_and_delete, PAIR, directory, disk, victim)

    # After half of a write, else before an operation: after an operation is before the next one.
    steps, operations = after_kills(tmp_path, save, None, check_continues)
    assert len(operations) > 5
    assert set(steps) == ({1, 2} if victim == 0 else {1}), "rank 1 ends its part before the checkpoint has its name"


@pytest.mark.parametrize(
    "loss", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("content", "files")), "all"]
)
def test_power_failure_at_every_operation_of_two_ranks(tmp_path: Path, loss: Loss) -> None:
    template = tmp_path / "template"
    run_threads(PAIR.sizes, save_step, PAIR, template, 1)
    for at in itertools.count():
        disk, directory = PowerlessDisk(at), fresh(tmp_path / "run", template)
        try:
            run_threads(PAIR.sizes, save_and_delete, PAIR, directory, disk)
        except (Killed, CommunicationError):
            disk.lose(loss)
            check_whole(directory)
        else:
            disk.lose(loss)
            assert check_whole(directory) == 2, "a save that has returned is durable"
            break
    assert at > 30


ERRORS = {
    errno.ENOSPC: "No space left on device.*bytes are free.*write to a larger disk; older files are untouched",
    errno.EIO: "Input/output error",
    errno.EDQUOT: "uota exceeded.*older files are untouched",
    errno.EROFS: "Read-only file system.*writable",
    errno.EFBIG: "File too large",
    errno.EXDEV: "Invalid cross-device link",
}


def test_every_operation_of_a_save_refused(tmp_path: Path) -> None:
    counted = CountingDisk()
    save_step(alone(), ALONE, tmp_path, 1, counted)
    count = len(counted.operations)
    for at, error in [*((at, errno.ENOSPC) for at in range(count)), *((1, error) for error in ERRORS)]:
        with pytest.raises(CheckpointError, match=ERRORS[error]) as raised:
            save_step(alone(), ALONE, tmp_path, 10 + at, RefusingDisk(at, error))
        assert str(tmp_path) in str(raised.value)
        assert not list(tmp_path.glob(".step-*")), "what was written is removed"
        # The last operation makes the new name durable: the new checkpoint then exists and is whole.
        check_whole(tmp_path)
        assert list(steps(tmp_path)) == [1] or at >= count - 1
        shutil.rmtree(tmp_path / f"step-{10 + at:08d}", ignore_errors=True)


def failing_save(mesh: Mesh, directory: Path, victim: int, at: int) -> str:
    """Return the error that this rank raises; an empty text if there is no such operation."""
    try:
        save_and_delete(mesh, PAIR, directory, RefusingDisk(at, errno.ENOSPC), victim)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_all_ranks_report_the_rank_whose_disk_is_full(tmp_path: Path, victim: int) -> None:
    run_threads(PAIR.sizes, save_step, PAIR, tmp_path, 1)
    failures = []
    for at in itertools.count():
        messages = set(run_threads(PAIR.sizes, failing_save, tmp_path, victim, at))
        assert len(messages) == 1, "ranks report different errors"
        failures.append(messages.pop())
        if failures[-1] == "":
            break
        assert "No space left on device" in failures[-1]
        assert f"(rank {victim}, on" in failures[-1]
        # Rank 0's last operation makes the new name durable: the new checkpoint then exists and is whole.
        if check_whole(tmp_path) == 2:
            assert victim == 0
            break
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert sum(f"rank-0000{victim}.safetensors: No space left" in message for message in failures) > 5


def test_a_refused_deletion_costs_only_space(tmp_path: Path) -> None:
    template, counted = tmp_path / "template", CountingDisk()
    for step in (1, 2):
        save_step(alone(), ALONE, template, step)
    keep_last(fresh(tmp_path / "run", template), 1, counted)
    for at in range(len(counted.operations)):
        directory = fresh(tmp_path / "run", template)
        with pytest.raises(OSError, match="Input/output"):
            keep_last(directory, 1, RefusingDisk(at, errno.EIO))
        assert check_continues(directory) == 2


def test_leftovers_that_cannot_be_removed_stop_no_save(tmp_path: Path) -> None:
    save_step(alone(), ALONE, tmp_path, 1)
    left = tmp_path / ".step-00000001.deleted"
    (tmp_path / "step-00000001").rename(left)
    disk = RefusingDisk(0, errno.EBUSY)  # as on NFS while a process reads the file
    save_step(alone(), ALONE, tmp_path, 2, disk)
    assert disk.operations[0] == "remove"
    assert left.exists()
    save_step(alone(), ALONE, tmp_path, 3)
    assert not left.exists()


def slow_disk(seconds: float) -> StorageWriter:
    return disk_before("flush", lambda _: time.sleep(seconds))


def test_ranks_wait_for_a_slow_disk_until_the_timeout(tmp_path: Path) -> None:
    run_threads(PAIR.sizes, save_and_delete, PAIR, tmp_path, slow_disk(0.1), 1, 1)
    with pytest.raises(CommunicationError, match="rank 1"):
        run_threads(PAIR.sizes, save_and_delete, PAIR, tmp_path, slow_disk(1.0), 1, timeout=0.3)
    assert check_continues(tmp_path) == 1


def save_apart(mesh: Mesh, directory: Path) -> None:
    save_step(mesh, PAIR, directory / f"disk-{mesh.rank}", 1)


def test_ranks_with_separate_disks_save_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk-1/.step-00000001.partial").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"disk-0.*rank-00001\.safetensors is missing"):
        run_threads(PAIR.sizes, save_apart, tmp_path)
    assert not list((tmp_path / "disk-0").iterdir())
