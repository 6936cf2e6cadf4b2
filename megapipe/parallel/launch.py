"""From the launcher's environment to a mesh, and back: one process, or the processes that torchrun started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megapipe.config.mesh_shape import DIMENSIONS, MeshShape, Partition
from megapipe.parallel.errors import LaunchError
from megapipe.parallel.groups import DistributedGroup, Group
from megapipe.parallel.links.exchange import SharedMemoryExchange
from megapipe.parallel.mesh import WORLD, Mesh
from megapipe.parallel.rendezvous import fresh_store, shares_store_with_earlier_starts

DeviceChoice = Literal["auto", "cpu", "cuda"]
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchEnvironment:
    """What torchrun tells a process. One process without a launcher is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "LaunchEnvironment":
        """Read the variables that torchrun sets.

        Raises:
            LaunchError: some are set and some are missing, or one has a value that cannot be.
        """
        found = [name for name in _VARIABLES if name in environment]
        missing = [name for name in _VARIABLES if name not in environment]
        if not found:
            return cls()
        if missing:
            raise LaunchError(
                f"{', '.join(missing)} not set although {', '.join(found)} is: start with torchrun, which sets all of "
                f"them, or unset {', '.join(found)} to run as one process"
            )
        rank, world_size, local_rank, port = (
            _integer(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, world_size)):
            if not 0 <= value < limit:
                raise LaunchError(f"{name}={value} is outside 0..WORLD_SIZE-1 (WORLD_SIZE={world_size})")
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is not a port: ports are 1..65535")
        return cls(rank, world_size, local_rank)


def initialize(sizes: Mapping[str, int], device: DeviceChoice = "auto", timeout: float = 600.0) -> Mesh:
    """Join the world that torchrun started, or run alone, and lay the mesh over it.

    A world of one process needs no torch.distributed and creates none. Larger ones speak gloo on the CPU and NCCL on
    GPUs, one process per GPU.

    Args:
        sizes: ranks along each dimension of `mesh.DIMENSIONS`; one that is left out has size 1.
        device: "auto" takes GPUs where there are any.
        timeout: seconds that a collective waits for its peers.

    Raises:
        LaunchError: the environment is incomplete or wrong, the layout does not fit the world, or there is no such
            device.
    """
    environment = LaunchEnvironment.read(os.environ)
    shape = MeshShape(sizes)
    if shape.world_size != environment.world_size:
        raise LaunchError(
            f"the layout {shape} needs {shape.world_size} processes but {environment.world_size} were started: start "
            f"with torchrun and {shape.world_size} processes in all, or change the parallel sizes"
        )
    place = _device(device, environment.local_rank)
    if environment.world_size > 1:
        limit = timedelta(seconds=timeout)
        fresh = shares_store_with_earlier_starts(os.environ)
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            timeout=limit,
            device_id=place if place.type == "cuda" else None,
            store=fresh_store(os.environ, limit) if fresh else None,
            rank=environment.rank if fresh else -1,
            world_size=environment.world_size if fresh else -1,
        )
    return connected_mesh(shape, place, timeout)


def shutdown() -> None:
    """Leave the world: destroy every group. Nothing to do for one process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connected_mesh(shape: MeshShape, device: torch.device, timeout: float = 600.0) -> Mesh:
    """The mesh over the torch.distributed world that this process is in, or over this process alone.

    Args:
        timeout: seconds that a collective of the mesh's groups waits for its peers.
    """
    if not dist.is_initialized():
        return Mesh(shape, 0, device, _no_group)
    return Mesh(shape, dist.get_rank(), device, _DistributedFactory(timedelta(seconds=timeout)))


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's view of a mesh of processes, for its own tools (DTensor, FSDP2, distributed checkpoints).

    It has the dimensions larger than 1, over the groups that the mesh already has.
    """
    names = tuple(name for name in DIMENSIONS if mesh.size(name) > 1)
    groups = [group.process_group for group in map(mesh.group, names) if isinstance(group, DistributedGroup)]
    ranks = torch.arange(mesh.world_size).view([mesh.size(name) for name in names])
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=names)


class _DistributedFactory:
    """Groups of processes. torch's own `init_device_mesh` makes them without a timeout of ours."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def __call__(self, name: str, partition: Partition) -> Group | None:
        if name == WORLD:
            world = dist.group.WORLD
            assert world is not None  # the caller has seen that torch.distributed is initialised
            return DistributedGroup(name, world, self._messages)
        mine = self._split(partition) if dist.get_backend() == "nccl" else self._create_each(partition)
        return None if mine is None else DistributedGroup(name, mine, self._messages)

    def _messages(self, group: DistributedGroup) -> SharedMemoryExchange | None:
        return SharedMemoryExchange.within_host(group, self._timeout.total_seconds())

    def _split(self, partition: Partition) -> dist.ProcessGroup | None:
        """All groups in one call, out of the world's communicator."""
        return dist.split_group(split_ranks=[list(ranks) for ranks in partition], timeout=self._timeout)

    def _create_each(self, partition: Partition) -> dist.ProcessGroup | None:
        """Every rank takes part in the creation of every group, also of those that it is not in."""
        groups = [dist.new_group(list(ranks), timeout=self._timeout) for ranks in partition]
        rank = dist.get_rank()
        return next((group for group, ranks in zip(groups, partition, strict=True) if rank in ranks), None)


def _no_group(name: str, partition: Partition) -> Group | None:
    raise LaunchError(f"the {name} group of ranks {partition[0]} needs more than one process")


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise LaunchError(f"{name}={environment[name]!r} is not an integer: torchrun sets it") from None


def _device(choice: DeviceChoice, local_rank: int) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise LaunchError(
            f"LOCAL_RANK={local_rank} needs GPU {local_rank} but this host has {count}: start at most one process per "
            "GPU, or run with device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
