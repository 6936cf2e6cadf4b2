"""Shards of a unit's state: together they are the whole, initial values included, and memory that comes and goes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.parallel.mesh import Mesh
from megapipe.parallel.segments import Sharding
from megapipe.parallel.unit_state import UnitState, is_allocated
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, Init, ParameterSpec
from tests.parallel.test_unit_state import PARAMETERS, Linear
from tests.support.meshes import run_mesh


@given(
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    count=st.integers(1, 5),
    stage=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_shards_together_are_the_whole(rows: list[int], count: int, stage: int, dtype: torch.dtype) -> None:
    specs = [
        ParameterSpec(f"p{i}", (n, 3), 0, Init("normal", 1.0), decay=i % 2 == 0, matrix=False)
        for i, n in enumerate(rows)
    ]
    whole = UnitState("u", specs, compute_dtype=dtype)
    whole.initialize(seed=5)
    parts = [
        UnitState("u", specs, compute_dtype=dtype, sharding=Sharding(stage, index, count)) for index in range(count)
    ]
    for part in parts:
        part.initialize(seed=5)
        assert part.table.num_elements % (SEGMENT_ALIGNMENT * count) == 0
    for segment in whole.table:
        expected = whole.in_shard(whole.master, segment)
        assert torch.equal(torch.cat([part.in_shard(part.master, part.table[segment.spec.name]) for part in parts]),
                           expected)  # fmt: skip
    master = torch.cat([part.master for part in parts])
    assert torch.equal(torch.cat([part.weight_shards[0] for part in parts]), master.to(dtype))
    size = whole.table.num_elements
    assert torch.equal(master[:size], whole.master)
    assert not master[size:].any()
    if stage < 3:
        assert all(torch.equal(part.weights[0], master.to(dtype)) for part in parts)


def backward_between_gathers(mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """One use of sharded weights, gathered, released and gathered again, its gradient reduced twice."""
    group = mesh.shard_group(2)
    state = UnitState("unit", PARAMETERS.values(), sharding=Sharding(3, group.rank, 2))
    state.initialize(seed=2)
    module = Linear()
    state.bind(module, PARAMETERS)
    assert not is_allocated(state.weights[0])
    x = torch.arange(40.0).view(2, 20).requires_grad_()
    for _ in range(2):
        state.gather_weights(0, group)
        state.await_weights(0)
        y = module(x)
        state.release_weights(0)
        assert not is_allocated(state.weights[0])
        state.gather_weights(0, group)
        state.await_weights(0)
        state.open_gradients()
        y.sum().backward()
        state.release_weights(0)
        group.reduce_into_part(state.gradients[0]).wait()
        state.close_gradients()
        assert not state.has_open_gradients()
    assert x.grad is not None
    return x.grad, state.reduced_gradient().clone()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_autograd_finds_the_weights_that_were_gathered_again(backend: str) -> None:
    whole = UnitState("unit", PARAMETERS.values())
    whole.initialize(seed=2)
    module = Linear()
    whole.bind(module, PARAMETERS)
    x = torch.arange(40.0).view(2, 20).requires_grad_()
    for _ in range(2):
        module(x).sum().backward()
    ranks = run_mesh({"data": 2}, backward_between_gathers, backend=backend)
    for found, _ in ranks:
        assert torch.equal(found, x.grad)
    gradient = torch.cat([shard for _, shard in ranks])
    assert torch.equal(gradient[: whole.table.num_elements], 2 * whole.gradients[0])


def members(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    groups = [mesh.shard_group(size) for size in (1, 2, 4)] + [mesh.shard_replicas(size) for size in (1, 2, 4)]
    assert mesh.shard_group(2) is groups[1]
    for group in groups:
        total = torch.tensor([float(mesh.rank)])
        group.all_reduce(total)
        assert total.item() == sum(group.ranks)
    with pytest.raises(
        ValueError, match="3 ranks per copy are given; the number must be at least 1 and divide the 4 replicas"
    ):
        mesh.shard_group(3)
    return tuple(group.ranks for group in groups)


def test_neighbours_share_a_copy() -> None:
    members_of_ranks = run_mesh({"data": 4, "tensor": 2}, members, backend="threads")
    assert members_of_ranks[2] == ((2,), (0, 2), (0, 2, 4, 6), (0, 2, 4, 6), (2, 6), (2,))
    assert members_of_ranks[7] == ((7,), (5, 7), (1, 3, 5, 7), (1, 3, 5, 7), (3, 7), (7,))


def test_versions_and_updates_have_their_own_shards_and_memory() -> None:
    """As a schedule that never flushes keeps them: what one update reduced stays while the next one's is added up."""
    state = UnitState("unit", PARAMETERS.values(), num_versions=2, gradient_buffers=2, sharding=Sharding(3, 1, 2))
    state.initialize(seed=2)
    assert torch.equal(*state.weight_shards)
    for update in (4, 5, 4):
        state.open_gradients(update)
        state.gradients_of(update)[0].fill_(float(update))
        assert [is_allocated(gradient) for gradient in state.gradients] == [update == 4, update == 5]
        state.close_gradients(update)
    size = state.table.num_elements // 2
    assert torch.equal(state.reduced_gradient(4), torch.full((size,), 8.0))
    assert torch.equal(state.reduced_gradient(5), torch.full((size,), 5.0))
    state.zero_gradients(4)
    state.open_gradients(6)
    state.close_gradients(6)
    assert not state.reduced_gradient(6).any()
    assert state.reduced_gradient(5).all()


def test_several_uses_cannot_be_sharded() -> None:
    with pytest.raises(
        ValueError, match="gradients and weights of 2 uses cannot be sharded, only those of one; shard"
    ):
        UnitState("unit", PARAMETERS.values(), num_uses=2, sharding=Sharding(2, 0, 2))
