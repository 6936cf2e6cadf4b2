"""Slices that are gathered have the values and gradients of the same computation on one rank.

tests/layers has the other collectives with gradients, in tensor-parallel layers and attention over shared samples.
"""

import pytest
import torch
from torch import Tensor

from megapipe.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.mesh import Mesh
from tests.support.meshes import Backend, run_mesh


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


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
