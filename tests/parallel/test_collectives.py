"""Tensor-parallel collectives give the values and gradients of the same computation on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.parallel.collectives import all_to_all, copy_to_group, gather_from_group, reduce_from_group
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.mesh import Mesh
from tests.support.meshes import Backend, run_mesh

ROWS, WIDTH, HIDDEN = 4, 6, 12


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, width], A [width, hidden], B [hidden, width] in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    x, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), a.requires_grad_(), b.requires_grad_()


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def two_layers(x: Tensor, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """The MLP of Megatron-LM, with A cut by columns and B by rows."""
    hidden = torch.tanh(copy_to_group(x, group) @ a)
    return torch.sin(reduce_from_group(hidden @ b, group))


def parallel_gradients(mesh: Mesh, compile_options: dict[str, Any] | None) -> dict[str, Tensor]:
    group = mesh.group("tensor")
    x, a, b = inputs()
    mine = slice(group.rank * HIDDEN // group.size, (group.rank + 1) * HIDDEN // group.size)
    function = two_layers if compile_options is None else torch.compile(two_layers, **compile_options)
    y = function(x, a[:, mine], b[mine], group)
    y.square().sum().backward()
    return {"y": y.detach(), "x": gradient(x), "a": gradient(a)[:, mine], "b": gradient(b)[mine]}


def check_against_one_rank(results: list[dict[str, Tensor]]) -> None:
    x, a, b = inputs()
    y = two_layers(x, a, b, SoloGroup("tensor"))
    y.square().sum().backward()
    for result in results:
        torch.testing.assert_close(result["y"], y.detach())
        torch.testing.assert_close(result["x"], x.grad)
        assert torch.equal(result["y"], results[0]["y"])
        assert torch.equal(result["x"], results[0]["x"])
    torch.testing.assert_close(torch.cat([result["a"] for result in results], 1), a.grad)
    torch.testing.assert_close(torch.cat([result["b"] for result in results], 0), b.grad)


@pytest.mark.parametrize(("backend", "size"), [("threads", 2), ("threads", 3), ("processes", 3)])
def test_copy_and_reduce_equal_one_rank(backend: Backend, size: int) -> None:
    check_against_one_rank(run_mesh({"tensor": size}, parallel_gradients, None, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "options"), [("processes", {"fullgraph": True}), ("threads", {})])
def test_copy_and_reduce_can_be_compiled(backend: Backend, options: dict[str, Any]) -> None:
    """In ranks that are processes into one graph."""
    options = {"backend": "aot_eager", **options}
    check_against_one_rank(run_mesh({"tensor": 2}, parallel_gradients, options, backend=backend, timeout=120))


def sliced_and_gathered(x: Tensor, weight: Tensor, group: Group, dim: int) -> Tensor:
    """A function of each element alone, computed slice by slice."""
    mine, factor = (copy_to_group(each, group).chunk(group.size, dim)[group.rank] for each in (x, weight))
    return gather_from_group(torch.exp(mine * factor), group, dim).pow(2)


def slice_gradients(mesh: Mesh, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = slice_inputs()
    y = sliced_and_gathered(x, weight, mesh.group("tensor"), dim)
    y.cos().sum().backward()
    return y.detach(), gradient(x), gradient(weight)


def slice_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(6, 2, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize(
    ("backend", "size", "dim"), [("threads", 2, 0), ("threads", 3, -1), ("threads", 2, 1), ("processes", 3, -1)]
)
def test_slices_and_gather_equal_one_rank(backend: Backend, size: int, dim: int) -> None:
    x, weight = slice_inputs()
    y = torch.exp(x * weight).pow(2)
    y.cos().sum().backward()
    for result in run_mesh({"tensor": size}, slice_gradients, dim, backend=backend):
        torch.testing.assert_close(result, (y.detach(), gradient(x), gradient(weight)), rtol=1e-14, atol=0)


def test_one_rank_gets_its_input_back() -> None:
    group = SoloGroup("tensor")
    x = torch.zeros(3, 3)
    assert copy_to_group(x, group) is x
    assert reduce_from_group(x, group) is x
    assert gather_from_group(x, group, 0) is x


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
