"""Every kind of group gives what one process would compute."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.config.parallel import MeshShape
from megapipe.parallel.collectives import reduce_from_group
from megapipe.parallel.groups import CommunicationError, DistributedGroup, Group, SoloGroup
from megapipe.parallel.in_process import in_process_meshes, run_in_process
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.shared_memory import CHUNK_BYTES, SLOTS, SharedMemoryExchange
from tests.support.meshes import Backend, run_mesh
from tests.support.ranks import run_ranks

BACKENDS = ["processes", "threads"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64).mul(8).to(dtype)


def all_collectives(mesh: Mesh) -> list[dict[str, object]]:
    """Results of every collective by type of tensor."""
    return [collectives_of(mesh, dtype) for dtype in DTYPES]


def collectives_of(mesh: Mesh, dtype: torch.dtype) -> dict[str, object]:
    group = mesh.group("data")
    mine = contribution(mesh.rank, dtype)
    total, largest, late = mine.clone(), mine.clone(), mine.clone()
    group.all_reduce(total)
    group.all_reduce(largest, op="max")
    work = group.all_reduce(late, async_op=True)
    gathered = group.all_gather(mine)
    work.wait()
    scattered = group.reduce_scatter(torch.stack([mine + peer for peer in range(group.size)]))
    whole, into = torch.empty(group.size * mine.numel(), dtype=dtype), torch.empty(group.size * 12, dtype=dtype)
    group.own_part(into).copy_(mine.view(-1))
    pieces = torch.cat([(mine + peer).view(-1) for peer in range(group.size)])
    works = [
        group.gather_into(whole, mine.view(-1)),
        group.reduce_into_part(pieces),
        group.gather_into(into, group.own_part(into)),
    ]
    for work in reversed(works):
        work.wait()
    works[1].wait()
    sent, shifted = mine.clone().expand(3, 3, 4).contiguous(), torch.empty(3, 3, 4, dtype=dtype)
    sent += torch.arange(3).view(3, 1, 1).to(dtype)
    for work in reversed([group.shift(one, other) for one, other in zip(sent, shifted, strict=True)]):
        work.wait()
    # Both under way together, and awaited the other way round.
    finish_gather = group.start_all_gather(mine.clone())
    finish_scatter = group.start_reduce_scatter(torch.stack([mine + peer for peer in range(group.size)]))
    started = {"late scattered": finish_scatter(), "late gathered": finish_gather()}
    group.broadcast(mine, source=group.size - 1)
    group.barrier()
    return started | {
        "gathered into": whole.view(group.size, 3, 4),
        "gathered in place": into.view(group.size, 3, 4),
        "reduced": group.own_part(pieces).view(3, 4),
        "shifted": shifted,
        "sum": total,
        "max": largest,
        "late": late,
        "gathered": gathered,
        "scattered": scattered,
        "broadcast": mine,
        "objects": group.all_gather_object({"rank": group.rank}),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_equal_one_process(backend: Backend, size: int) -> None:
    by_rank = run_mesh({"data": size}, all_collectives, backend=backend)
    for dtype, *results in zip(DTYPES, *by_rank, strict=True):
        check_collectives(backend, dtype, results)


def check_collectives(backend: Backend, dtype: torch.dtype, results: list[dict[str, Any]]) -> None:
    """Threads add up in the order of ranks."""
    size = len(results)
    parts = torch.stack([contribution(rank, dtype) for rank in range(size)])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    exact = torch.stack([contribution(rank, dtype) for rank in range(size)]).double().sum(0)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["sum"].double(), exact, rtol=tolerance, atol=8 * tolerance)
        assert torch.equal(result["sum"], sum(parts[1:], parts[0]) if backend == "threads" else results[0]["sum"])
        assert torch.equal(result["late"], result["sum"])
        assert torch.equal(result["max"], parts.amax(0))
        assert torch.equal(result["gathered"], parts)
        assert torch.equal(result["late gathered"], parts)
        assert torch.equal(result["late scattered"], result["scattered"])
        shifted = (parts + rank).double().sum(0)
        torch.testing.assert_close(result["scattered"].double(), shifted, rtol=tolerance, atol=8 * tolerance)
        in_order = [part + rank for part in parts]
        for part in in_order[1:]:
            in_order[0] = in_order[0] + part
        assert torch.equal(result["reduced"], in_order[0])
        assert torch.equal(result["gathered into"], parts)
        assert torch.equal(result["gathered in place"], parts)
        assert all(torch.equal(each, parts[rank - 1] + number) for number, each in enumerate(result["shifted"]))
        assert torch.equal(result["broadcast"], parts[-1])
        assert result["objects"] == [{"rank": peer} for peer in range(size)]


def start_reduction_then_talk(mesh: Mesh) -> float:
    """Rank 0 starts a reduction that rank 1 joins only after another collective: asynchronous means that it may."""
    data, world = mesh.group("data"), mesh.world
    value = torch.ones(1)
    if mesh.rank < 2:
        work = data.all_reduce(value, async_op=True)
        world.barrier()
    else:
        world.barrier()
        work = data.all_reduce(value, async_op=True)
    work.wait()
    return value.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_reduction_blocks_no_rank_before_wait(backend: Backend) -> None:
    assert run_mesh({"data": 2, "tensor": 2}, start_reduction_then_talk, backend=backend) == [2.0] * 4


def wait_for_failed_peer(mesh: Mesh, messages: list[str]) -> None:
    if mesh.rank == 1:
        raise ValueError("bad batch")
    with pytest.raises(CommunicationError) as caught:
        mesh.group("data").all_reduce(torch.ones(2))
    messages.append(str(caught.value))


def test_failed_threads_break_the_wait_and_are_reported() -> None:
    messages: list[str] = []
    with pytest.raises(ValueError, match="bad batch"):
        run_mesh({"data": 2}, wait_for_failed_peer, messages, backend="threads")
    assert messages == [
        "rank 0 waited for rank 1 in all_reduce sum of float32 (2,) (collective 0 of the world group), "
        "but rank 1 failed: ValueError('bad batch')"
    ]


def stay_silent(mesh: Mesh) -> str:
    if mesh.rank == 1:
        return ""
    with pytest.raises(CommunicationError) as caught:
        mesh.group("data").barrier()
    return str(caught.value)


def test_silent_thread_is_named_after_the_timeout() -> None:
    started = time.monotonic()
    message = run_in_process(in_process_meshes({"data": 2}, timeout=0.2), stay_silent)[0]
    assert "waited for rank 1 in barrier" in message
    assert "within 0.2 s" in message
    assert time.monotonic() - started < 10


def disagree(mesh: Mesh) -> None:
    mesh.group("data").all_reduce(torch.ones(2 + mesh.rank))


def test_threads_in_different_collectives_are_reported() -> None:
    with pytest.raises(CommunicationError, match="same collectives in the same order"):
        run_mesh({"data": 2}, disagree, backend="threads")


def meet_the_dead(rank: int, operation: str) -> str:
    """Rank 0 gathers once with rank 1, which then dies."""
    mesh = connected_mesh(MeshShape({"data": 2}), torch.device("cpu"), timeout=50.0)
    group = mesh.group("data")
    whole, part = torch.empty(8), torch.ones(4)
    group.gather_into(whole, part).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(part),
        "all_reduce with gradients": lambda: reduce_from_group(part, group),
        "all_gather": lambda: group.gather_into(whole, part).wait(),
    }
    with pytest.raises(CommunicationError) as caught:
        calls[operation]()
    return str(caught.value)


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce with gradients", "all_gather"])
def test_dead_process_is_reported_with_group_and_operation(operation: str) -> None:
    message = run_ranks(2, meet_the_dead, operation, may_die=[1])[0]
    assert message.startswith(f"rank 0: {operation.split()[0]} in the world group with rank 1 failed")
    if operation == "all_gather":
        assert " failed: rank 0 waited for rank 1 to " in message
        assert message.endswith("but rank 1 has ended")


def test_solo_results_do_not_share_memory_with_the_input() -> None:
    group: Group = SoloGroup("data")
    source = torch.zeros(1, 2)
    group.all_gather(source).add_(1)
    group.reduce_scatter(source).add_(1)
    assert torch.equal(source, torch.zeros(1, 2))


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
