"""Gathers and reductions by parts through memory that members share: more than it holds, and none."""

import time

import pytest
import torch

from megapipe.parallel.groups import DistributedGroup
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.shared_memory import CHUNK_BYTES, SLOTS, SharedMemoryExchange
from tests.support.meshes import run_mesh

MORE_THAN_FITS = CHUNK_BYTES * SLOTS // 4 + 4097
"""Elements in fp32 of a piece that a peer's slots do not hold, whose last chunk is a short one."""


def several_at_once(mesh: Mesh) -> None:
    group = mesh.group("data")
    mine = [torch.randn(MORE_THAN_FITS, generator=torch.Generator().manual_seed(group.rank + 7 * n)) for n in (0, 1)]
    wholes = [torch.empty(group.size * MORE_THAN_FITS) for _ in mine]
    summed = torch.cat([mine[0] + peer for peer in range(group.size)])
    expected = group.reduce_scatter(summed.view(group.size, -1))
    works = [group.gather_into(whole, part) for whole, part in zip(wholes, mine, strict=True)]
    works.append(group.reduce_into_part(summed))
    if group.rank == 0:
        time.sleep(0.2)  # the others are in the sum already, with messages that did not fit
    group.all_reduce(torch.ones(1))
    for work in works:
        work.wait()
    for whole, part in zip(wholes, mine, strict=True):
        assert torch.equal(whole.view(group.size, -1), group.all_gather(part))
    torch.testing.assert_close(group.own_part(summed), expected)
    assert isinstance(group, DistributedGroup)
    assert isinstance(group.messages, SharedMemoryExchange)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_messages_beyond_the_slots_do_not_block(size: int) -> None:
    run_mesh({"data": size}, several_at_once, timeout=60.0)


def without_shared_memory(mesh: Mesh) -> torch.Tensor:
    group = mesh.group("data")
    assert isinstance(group, DistributedGroup)
    group._make_messages = None
    whole = torch.empty(4 * group.size)
    group.gather_into(whole, torch.full((4,), float(group.rank))).wait()
    group.reduce_into_part(whole).wait()
    assert not isinstance(group.messages, SharedMemoryExchange)
    return group.own_part(whole)


def test_members_on_several_hosts_use_gloo() -> None:
    for rank, part in enumerate(run_mesh({"data": 2}, without_shared_memory)):
        assert part.tolist() == [2.0 * rank] * 4
