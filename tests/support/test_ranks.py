"""The rank runner itself: results in order, failures named, nothing left running or shared."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def whoami(rank: int, offset: int) -> tuple[int, int, float, int]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return rank + offset, dist.get_world_size(), total.item(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_come_in_rank_order_from_one_gloo_world(world_size: int) -> None:
    total = world_size * (world_size - 1) / 2
    assert run_ranks(world_size, whoami, 10) == [(10 + rank, world_size, total, 1) for rank in range(world_size)]


def scribble(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    tensor += rank
    return tensor


def test_tensors_are_copied_both_ways() -> None:
    tensor = torch.zeros(3)
    results = run_ranks(2, scribble, tensor)
    assert torch.equal(tensor, torch.zeros(3))
    assert [result[0].item() for result in results] == [0.0, 1.0]


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def test_exception_is_reported_with_rank_and_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised\n(?s:.*)in raise_on_one(?s:.*)KeyError: 'the reason'"):
        run_ranks(3, raise_on_one)


def die_on_one(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_death_is_reported_unless_it_is_expected() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(2, die_on_one)
    assert run_ranks(2, die_on_one, may_die=[1]) == ["alive", None]


def hang_on_one(rank: int, folder: str) -> None:
    with open(os.path.join(folder, str(os.getpid())), "w"):
        pass
    if rank == 1:
        threading.Event().wait()


def test_hanging_rank_is_named_and_killed(tmp_path: os.PathLike[str]) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not answer within 4 s and was killed"):
        run_ranks(2, hang_on_one, str(tmp_path), timeout=4)
    assert time.monotonic() - started < 30
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert len(pids) == 2
    # The fork server reaps them a moment after they are gone for us.
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
