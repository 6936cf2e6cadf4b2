"""A whole mesh as threads of one process: every rank's groups and links live in memory, on one device."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megapipe.config.mesh_shape import MeshShape, Partition
from megapipe.parallel.groups import Group, ThreadGroup, ThreadWorld
from megapipe.parallel.groups.threads import ThreadBoard
from megapipe.parallel.mesh import Mesh


class InProcessMesh(Mesh):
    """A mesh whose ranks are threads.

    Attributes:
        threads: what all ranks of the mesh share.
    """

    def __init__(self, shape: MeshShape, rank: int, device: torch.device, threads: "InProcessWorld") -> None:
        self.threads = threads
        super().__init__(shape, rank, device, self._thread_group)

    def _thread_group(self, name: str, partition: Partition) -> Group | None:
        mine = next((ranks for ranks in partition if self.rank in ranks), None)
        return None if mine is None else ThreadGroup(name, self.threads.board(name, mine), self.rank)


class InProcessWorld(ThreadWorld):
    """The shared side of all in-process groups: one board for each group of ranks."""

    def __init__(self, size: int, timeout: float) -> None:
        super().__init__(size, timeout)
        self._boards: dict[tuple[str, tuple[int, ...]], ThreadBoard] = {}

    def board(self, name: str, ranks: tuple[int, ...]) -> ThreadBoard:
        """The board of the group `name` of `ranks`; the first member to ask creates it."""
        with self.changed:
            return self._boards.setdefault((name, ranks), ThreadBoard(self, ranks))


def in_process_meshes(
    sizes: Mapping[str, int], device: torch.device | str = "cpu", timeout: float = 600.0
) -> list[InProcessMesh]:
    """One mesh per rank, in rank order, for ranks that run as threads of this process on one device.

    Args:
        sizes: ranks along each dimension of `mesh.DIMENSIONS`; one that is left out has size 1.
        device: the device that all ranks share.
        timeout: seconds that a rank waits for its peers.
    """
    shape = MeshShape(sizes)
    world = InProcessWorld(shape.world_size, timeout)
    return [InProcessMesh(shape, rank, torch.device(device), world) for rank in range(shape.world_size)]


def run_in_process(meshes: Sequence[InProcessMesh], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(mesh, *args)` for every mesh, each on its own thread, and return the results in rank order.

    A rank that raises breaks the waits of all others, so none hangs; its exception is the one raised here.
    """
    results: list[Any] = [None] * len(meshes)
    failures: list[BaseException] = []

    def run(mesh: InProcessMesh) -> None:
        try:
            results[mesh.rank] = function(mesh, *args)
        except BaseException as error:
            failures.append(error)
            mesh.threads.fail(mesh.rank, error)

    threads = [
        threading.Thread(target=run, args=(mesh,), name=f"megapipe rank {mesh.rank}", daemon=True) for mesh in meshes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
