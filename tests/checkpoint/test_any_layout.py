"""Saved on any layout, loaded on any other: every element arrives at its global place, and is stored once."""

import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError, DamagedCheckpointError, load, load_weights, read_manifest, save
from megapipe.checkpoint.extents import tiling_problem
from megapipe.checkpoint.manifest import WEIGHTS
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.toy import (
    ALONE,
    MODEL,
    MOMENTS,
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
    """Chunks tile every tensor, and the files hold their elements and nothing else."""
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


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    layout = Layout({"data": 4}, [UNITS])
    path = run_threads(layout.sizes, save_step, layout, tmp_path, 1)[0]
    sizes = [
        sum(1 for chunk in read_manifest(path).chunks if chunk.file == file) for file in read_manifest(path).files
    ]
    assert len(sizes) == 4, "every replica should write something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_weight_versions_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    source = Layout({"tensor": 2}, [UNITS], versions=3, dtype=dtype)
    path = run_threads(source.sizes, save_step, source, tmp_path, 5)[0]
    target = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]], versions=3, dtype=dtype)
    run_threads(target.sizes, load_step, target, path, 5, 2)


def test_fewer_versions_take_the_newest_and_more_start_from_it(tmp_path: Path) -> None:
    two = Layout({}, [UNITS], versions=2)
    path = save_step(alone(), two, tmp_path, 5)
    load_step(alone(), ALONE, path, 5)
    single = save_step(alone(), ALONE, tmp_path, 6)
    states = make_states(alone(), two)
    load(single, states, {}, alone(), moments=ToyMoments())
    check(states, 6)
    for state in states:
        assert torch.equal(state.weights[0], state.weights[1])


def test_several_updates_a_step_number_the_versions(tmp_path: Path) -> None:
    path = save_step(alone(), ALONE, tmp_path, 5)
    states = make_states(alone(), ALONE)
    load(path, states, {}, alone(), moments=ToyMoments(), updates_per_step=4)
    assert {state.newest for state in states} == {20}


def test_bf16_goes_on_from_its_fp32_master(tmp_path: Path) -> None:
    half = Layout({}, [UNITS], dtype=torch.bfloat16)
    path = save_step(alone(), half, tmp_path, 5)
    assert {chunk.dtype for chunk in read_manifest(path).chunks} == {"F32"}
    states = make_states(alone(), half)
    load(path, states, {}, alone(), moments=ToyMoments())
    check(states, 5)
    for state in states:
        assert torch.equal(state.weights[0], state.master.to(torch.bfloat16))
    load_step(alone(), ALONE, path, 5)


def test_weights_alone_are_those_before_a_first_step(tmp_path: Path) -> None:
    path = save_step(alone(), Layout({}, [UNITS], versions=2), tmp_path, 5)
    states = make_states(alone(), ALONE)
    assert load_weights(path, states, alone()).run == run_state(5)
    reference = make_states(alone(), ALONE)
    fill(reference, 5)
    for state, other in zip(states, reference, strict=True):
        assert torch.equal(state.master, other.master)
        assert (state.newest, state.moments) == (0, {})


def test_units_that_were_never_updated_have_no_moments(tmp_path: Path) -> None:
    states = make_states(alone(), ALONE)
    fill(states, 1, moments=())
    path = save(tmp_path, states, {}, run_state(1), alone())
    found, applied = make_states(alone(), ALONE), {"one": 3}
    load(path, found, applied, alone(), moments=ToyMoments())
    assert all(state.moments == {} for state in found)
    assert set(applied.values()) == {0}


def test_an_optimizer_with_other_moments_is_refused(tmp_path: Path) -> None:
    path = save_step(alone(), ALONE, tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"not its momentum.*init_from"):
        load(path, make_states(alone(), ALONE), {}, alone(), moments=ToyMoments(("momentum",)))


def load_and_look(mesh: Mesh, layout: Layout, path: Path) -> tuple[type, str, bool]:
    """The error that loading raises on this rank, and whether the states are as they were."""
    states = make_states(mesh, layout)
    fill(states, 3)
    applied = {"one": 3}
    try:
        load(path, states, applied, mesh, moments=ToyMoments())
    except CheckpointError as error:
        check(states, 3)
        return type(error), str(error), applied == {"one": 3}
    raise AssertionError("the damage went unnoticed")


def test_all_ranks_tell_of_damage_that_one_meets_and_none_has_loaded_a_part(tmp_path: Path) -> None:
    layout = Layout({"pipeline": 2, "tensor": 2}, [["table", "one"], ["two", "table"]])
    path = run_threads(layout.sizes, save_step, layout, tmp_path, 5)[0]
    (chunk,) = [each for each in read_manifest(path).chunks if each.name == "two.norm" and each.kind == WEIGHTS]
    content = bytearray((path / chunk.file).read_bytes())
    value = safetensors.torch.load_file(path / chunk.file)[chunk.key]
    position = content.index(value.numpy().tobytes())
    content[position] ^= 1
    (path / chunk.file).write_bytes(content)
    outcomes = run_threads(layout.sizes, load_and_look, layout, path)
    assert len(set(outcomes)) == 1, "ranks disagree"
    kind, told, untouched = outcomes[0]
    assert kind is DamagedCheckpointError
    assert chunk.file in told
    assert "two.norm" in told
    assert "rank 2" in told
    assert untouched
