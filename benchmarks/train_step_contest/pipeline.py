"""A pipeline of two ranks compared with one rank that has the same number of threads, on a CPU."""

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from megapipe.config.parallel import MeshShape
from megapipe.parallel.launch import connected_mesh

from .contestants import Setting, megapipe_step
from .timing import in_turns

PIPELINE, ALONE = "two ranks, 1f1b", "one rank"


def pipeline_seconds(setting: Setting, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of steps of one rank with two threads, and of a pipeline of two ranks with one thread each.
    They take turns."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank, (world, threads) in enumerate([(2, 1), (2, 1), (1, 2)]):
            parent_end, child_end = context.Pipe()
            store = str(Path(folder) / "store")
            process = context.Process(target=_rank, args=(rank % 2, world, threads, store, setting, child_end))
            process.start()
            pipes.append(parent_end)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def together(members: list[int]) -> float:
            start = time.perf_counter()
            for member in members:
                pipes[member].send(True)
            for member in members:
                pipes[member].recv()
            return time.perf_counter() - start

        seconds = in_turns({PIPELINE: lambda: together([0, 1]), ALONE: lambda: together([2])}, repeats)
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join()
    return seconds


def _rank(rank: int, world: int, threads: int, store: str, setting: Setting, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = connected_mesh(MeshShape({"pipeline": world}), torch.device("cpu"))
    step = megapipe_step(mesh, setting, compiled=False)
    pipe.send(True)
    while pipe.recv():
        step()
        pipe.send(True)
    if world > 1:
        dist.destroy_process_group()
