"""Processes that measure together: as many ranks as asked for on this machine, joined in one world."""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

from megapipe.config.mesh_shape import MeshShape
from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.launch import connected_mesh, shutdown
from megapipe.parallel.mesh import Mesh
from megapipe.training.signals import STOPS

TIMEOUT = 600.0
"""Seconds after which ranks that have not answered are given up."""


def on_ranks(count: int, device_type: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(mesh, *args)` on `count` fresh processes with one thread each; their results in rank order.

    The mesh has all ranks along its data dimension; `function`, arguments and results are pickled. Inside a program's
    main module the call stands under `if __name__ == "__main__"`, as multiprocessing's spawn asks.

    Raises:
        CommunicationError: a rank raised, died or did not answer; the message holds its traceback.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megapipe-profile-") as folder:
        ranks: list[tuple[SpawnProcess, connection.Connection]] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                job = (rank, count, device_type, os.path.join(folder, "store"), theirs, function, args)
                process = context.Process(target=_work, args=job, name=f"rank {rank}", daemon=True)
                with _signals_wait():
                    process.start()
                    ranks.append((process, ours))
                theirs.close()
            return _answers([pipe for _, pipe in ranks])
        finally:
            with _signals_wait():
                for process, pipe in ranks:
                    process.kill()
                    process.join()
                    pipe.close()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end a program wait until a process has got all that it is given and is known, and until all have
    been ended. A process that is started inside never gets them: a terminal sends Ctrl-C to all, and the one that
    started the ranks ends them."""
    resource_tracker.ensure_running()  # which start() does too, and lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answers(pipes: list[connection.Connection]) -> list[Any]:
    deadline, found = time.monotonic() + TIMEOUT, {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise CommunicationError(
                f"rank {', '.join(str(rank) for rank in waiting.values())} did not answer within {TIMEOUT:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, answer = pipe.recv()
            except EOFError:
                succeeded, answer = False, "its process died"
            if not succeeded:
                raise CommunicationError(f"rank {rank} of {len(pipes)} that measure failed: {answer}")
            found[rank] = answer
    return [found[rank] for rank in range(len(pipes))]


def _work(
    rank: int,
    count: int,
    device_type: str,
    store: str,
    pipe: connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        mesh = _join(rank, count, device_type, store)
        pipe.send((True, function(mesh, *args)))
        mesh.world.barrier()
        shutdown()
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _join(rank: int, count: int, device_type: str, store: str) -> Mesh:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=TIMEOUT),
        )
    return connected_mesh(MeshShape({"data": count}), device, TIMEOUT)
