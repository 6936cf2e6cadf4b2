"""Run a function in several processes of this host, which are connected by gloo and have one thread each."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=600)


def in_ranks(number: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work(rank, *arguments)` on `number` ranks, and return what it returned on rank 0.

    work: a function at the top level of a module, so that a new process can import it. Raises RuntimeError if a rank
    ends early; the rank prints its error to stderr.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parent_end, child_end = context.Pipe()
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=(rank, number, store, child_end, work, arguments))
            for rank in range(number)
        ]
        for rank in ranks:
            rank.start()
        child_end.close()
        try:
            result: T = parent_end.recv()
        except EOFError:
            raise RuntimeError("a rank ended early; its error is printed above") from None
        finally:
            for rank in ranks:
                rank.join(timeout=60.0)
                rank.kill()
    return result


@contextmanager
def joined(rank: int, number: int, store: str) -> Iterator[None]:
    """Within the block, make this process one of `number` ranks. store: file with which ranks find each other."""
    torch.set_num_threads(1)
    files = dist.FileStore(store, number)
    dist.init_process_group("cpu:gloo", store=files, rank=rank, world_size=number, timeout=TIMEOUT)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _rank(
    rank: int, number: int, store: str, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with joined(rank, number, store):
        result = work(rank, *arguments)
        if rank == 0:
            pipe.send(result)
