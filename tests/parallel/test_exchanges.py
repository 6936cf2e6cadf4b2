"""Shifts and all-to-alls, over processes and between threads."""

import pytest
import torch

from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.mesh import Mesh
from tests.support.meshes import Backend, run_mesh


def shifted(mesh: Mesh, count: int) -> list[int]:
    """Several shifts under way at once, awaited last one first."""
    group = mesh.group("context")
    sent = [torch.full((1000,), 10 * number + group.rank) for number in range(count)]
    received = [torch.empty_like(each) for each in sent]
    works = [group.shift(one, other) for one, other in zip(sent, received, strict=True)]
    for work in reversed(works):
        work.wait()
    assert all(bool((each == each[0]).all()) for each in received)
    return [int(each[0]) for each in received]


@pytest.mark.parametrize(("backend", "size"), [("threads", 2), ("threads", 3), ("processes", 3)])
def test_shifts_arrive_in_order_from_the_rank_before(size: int, backend: Backend) -> None:
    received = run_mesh({"context": size}, shifted, 3, backend=backend)
    assert received == [[10 * number + (rank - 1) % size for number in range(3)] for rank in range(size)]


def test_one_rank_shifts_to_itself() -> None:
    into = torch.zeros(3)
    SoloGroup("context").shift(torch.ones(3), into).wait()
    assert into.tolist() == [1.0] * 3


def exchanged(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    group = mesh.group("context")
    x = (torch.arange(group.size * 2.0).view(group.size, 2) + 100 * group.rank).requires_grad_()
    y = all_to_all(x, group)
    (gradient,) = torch.autograd.grad(y, x, y.detach() + 1000 * group.rank)
    return y.detach(), gradient


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_slices_go_to_their_ranks_and_gradients_back(backend: Backend) -> None:
    for rank, (y, gradient) in enumerate(run_mesh({"context": 3}, exchanged, backend=backend)):
        place = torch.arange(3.0).view(3, 1)
        columns = torch.arange(2.0)
        assert torch.equal(y, 100 * place + 2 * rank + columns)
        # Slice j was on rank j, whose gradient was what it got there plus 1000 j.
        assert torch.equal(gradient, 100 * rank + 2 * place + columns + 1000 * place)
