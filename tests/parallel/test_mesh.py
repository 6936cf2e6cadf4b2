"""The mesh's arithmetic, and its groups against it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.parallel import DIMENSIONS, MeshShape
from megapipe.parallel.launch import device_mesh
from megapipe.parallel.mesh import Mesh
from tests.support.meshes import Backend, run_mesh

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in DIMENSIONS})


@given(SIZES)
def test_coordinates_equal_numpy_row_major_order(sizes: dict[str, int]) -> None:
    shape = MeshShape(sizes)
    extents = tuple(sizes[name] for name in DIMENSIONS)
    for rank in range(shape.world_size):
        expected = dict(zip(DIMENSIONS, map(int, np.unravel_index(rank, extents)), strict=True))
        assert shape.coordinates(rank) == expected
        assert shape.rank_of(expected) == rank


@given(SIZES, st.sets(st.sampled_from(DIMENSIONS)))
def test_partition_covers_the_world_once_along_its_dimensions(sizes: dict[str, int], names: set[str]) -> None:
    shape = MeshShape(sizes)
    parts = shape.partition(*names)
    assert sorted(rank for part in parts for rank in part) == list(range(shape.world_size))
    for part in parts:
        assert len(part) == math.prod(sizes[name] for name in names)
        assert list(part) == sorted(part)
        for name in set(DIMENSIONS) - names:
            assert len({shape.coordinates(rank)[name] for rank in part}) == 1


def test_groups_of_shared_weights_start_with_the_first_replica() -> None:
    shape = MeshShape({"tensor": 2, "pipeline": 3, "data": 2})
    assert shape.stage_partition((0, 2)) == ((0, 4, 6, 10), (1, 5, 7, 11))


def test_unknown_dimension_and_bad_size_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mesh dimension 'tensors': the dimensions are data, pipeline"):
        MeshShape({"tensors": 2})
    with pytest.raises(ValueError, match="pipeline has size 0"):
        MeshShape({"pipeline": 0})
    for sizes, message in (("pipeline", "pass a mapping"), ({"pipeline": "2"}, "has size '2'; it must be a whole")):
        with pytest.raises(ValueError, match=message):
            MeshShape(sizes)  # type: ignore[arg-type]


def describe(mesh: Mesh) -> dict[str, object]:
    """Return the members of every group of this rank: its attributes, and the ranks gathered through it."""
    names = [("data",), ("pipeline",), ("context",), ("tensor",), ("data", "context"), ("pipeline", "tensor")]
    groups = {"+".join(dimensions): mesh.group(*dimensions) for dimensions in names} | {"world": mesh.world}
    subgroup = mesh.stage_group((0, mesh.size("pipeline") - 1))
    if subgroup is not None:
        groups["ends"] = subgroup
    assert mesh.stage_group((0, mesh.size("pipeline") - 1)) is subgroup
    groups["second"] = mesh.second_world()
    assert mesh.second_world() is groups["second"] is not mesh.world
    gathered = {name: tuple(group.all_gather(torch.tensor(mesh.rank)).tolist()) for name, group in groups.items()}
    assert gathered == {name: group.ranks for name, group in groups.items()}
    assert all(group.ranks[group.rank] == mesh.rank for group in groups.values())
    return {"groups": gathered, "coordinates": {name: mesh.coordinate(name) for name in DIMENSIONS}}


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("processes", {"pipeline": 3, "tensor": 2}),
        ("threads", {"pipeline": 3, "tensor": 2}),
        ("threads", {"data": 2, "pipeline": 2, "tensor": 2}),
        ("threads", {"data": 2, "pipeline": 2, "context": 2}),
        pytest.param("processes", {"data": 2, "pipeline": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param("processes", {"data": 2, "pipeline": 2, "context": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_groups_hold_the_ranks_that_differ_in_their_dimensions(backend: Backend, sizes: dict[str, int]) -> None:
    shape = MeshShape(sizes)
    for rank, result in enumerate(run_mesh(sizes, describe, backend=backend)):
        assert result["coordinates"] == shape.coordinates(rank)
        for name, ranks in result["groups"].items():
            if name == "ends":
                partition = shape.stage_partition((0, shape.sizes["pipeline"] - 1))
            else:
                partition = shape.partition(*(DIMENSIONS if name in ("world", "second") else name.split("+")))
            assert ranks == next(part for part in partition if rank in part)
        stage = shape.coordinates(rank)["pipeline"]
        assert ("ends" in result["groups"]) == (stage in (0, shape.sizes["pipeline"] - 1))


def sum_with_torch_tools(mesh: Mesh) -> torch.Tensor:
    """A DTensor that is a partial sum over `tensor`, and replicated over `pipeline`, made whole."""
    # Imported here, as it takes seconds that the other ranks of this module need not spend.
    from torch.distributed.tensor import DTensor, Partial, Replicate

    local = torch.tensor([float(mesh.rank)])
    return DTensor.from_local(local, device_mesh(mesh), [Replicate(), Partial()]).full_tensor()


@pytest.mark.slow
def test_torch_tools_work_on_the_device_mesh() -> None:
    totals = run_mesh({"pipeline": 2, "tensor": 2}, sum_with_torch_tools)
    assert [total.item() for total in totals] == [1.0, 1.0, 5.0, 5.0]


def ask_wrongly(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"no group over \('data', 'tensor'\)"):
        mesh.group("data", "tensor")
    with pytest.raises(ValueError, match="no group over"):
        mesh.group("replica")
    with pytest.raises(ValueError, match=r"\(1, 0\) must ascend"):
        mesh.stage_group((1, 0))
    with pytest.raises(ValueError, match=r"0\.\.1"):
        mesh.stage_group((0, 2))


def test_groups_that_do_not_exist_are_refused() -> None:
    run_mesh({"pipeline": 2}, ask_wrongly, backend="threads")
