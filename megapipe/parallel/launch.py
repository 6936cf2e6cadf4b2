"""Creates a mesh from the launcher's environment, for one process or for those that torchrun started, and shuts it
down."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megapipe.config.field_types import whole_number
from megapipe.config.parallel import DIMENSIONS, MeshShape, Partition
from megapipe.parallel.groups import DistributedGroup, Group, LaunchError
from megapipe.parallel.mesh import WORLD, Mesh
from megapipe.parallel.rendezvous import Start, connect
from megapipe.parallel.shared_memory import SharedMemoryExchange

DeviceChoice = Literal["auto", "cpu", "cuda"]
MOST_RANKS = 1 << 20
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_LARGEST_CACHED_MB = 16
"""Size in MB up to which torch keeps freed pinned memory for reuse. Larger tensors live long, or their owner reuses
them."""
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_variables_set: dict[str, str] = {}
"""The environment variables that this process has set for its GPU."""


def gpu_variables(
    sizes: Mapping[str, int], zero_stage: int, capability: tuple[int, int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that processes on GPUs need and that `environment` does not set.

    docs/nccl.md has the reason for each.

    Args:
        sizes: ranks along each dimension of the mesh.
        capability: compute capability of the GPU.
    """
    # One hardware queue starts communication before the matrix product that is launched after it. Blackwell does not
    # need that, and gathers of sharded weights must not wait for it.
    layered = max(sizes.get("tensor", 1), sizes.get("context", 1)) > 1
    queues = 1 if layered and capability < (10, 0) and zero_stage < 3 else 32
    variables = {
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_RUNTIME_CONNECT": "0",
        _ALLOCATOR_NAMES[0]: allocator_settings(torch.__version__),
        _QUEUES: str(queues),
    }
    already_set = set(environment)
    if not already_set.isdisjoint(_ALLOCATOR_NAMES):
        already_set.add(_ALLOCATOR_NAMES[0])
    return {name: value for name, value in variables.items() if name not in already_set}


def allocator_settings(version: str) -> str:
    """Return the allocator's settings for this version of torch.

    torch rounds pinned memory up to a power of two, up to twice as much for offloaded state. Since 2.13 it can leave
    sizes above a threshold as they are. It must not keep those for later: until pytorch#192722 a larger tensor got a
    smaller block.
    """
    settings = "expandable_segments:True"
    if tuple(map(int, version.split(".")[:2])) < (2, 13):
        return settings
    limits = (f"pinned_max_{name}_mb:{_LARGEST_CACHED_MB}" for name in ("round_threshold", "cached_size"))
    return ",".join([settings, *limits])


def set_driver_variables(choice: DeviceChoice) -> None:
    """Set what `gpu_variables` returns for any GPU and layout. Call it before anything asks CUDA for a device.

    The driver reads these variables when it starts, and torch then sets its own default for loading modules.
    """
    if choice != "cpu" and torch.backends.cuda.is_built():
        _set(gpu_variables({}, 0, (0, 0), {**os.environ, _QUEUES: ""}))


def set_gpu_variables(
    choice: DeviceChoice, local_rank: int, sizes: Mapping[str, int], zero_stage: int = 0
) -> dict[str, str]:
    """Set in this process what `gpu_variables` returns for its GPU, before it has a CUDA context; nothing on the CPU.

    Returns the variables that megapipe has set in this process.
    """
    set_driver_variables(choice)
    if choice == "cpu" or not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return {}
    _set(gpu_variables(sizes, zero_stage, torch.cuda.get_device_capability(local_rank), os.environ))
    return dict(_variables_set)


def described_gpu_variables(variables: Mapping[str, str]) -> str:
    """Return a line with the variables that megapipe has set."""
    return f"set for the GPU (docs/nccl.md): {' '.join(f'{name}={value}' for name, value in variables.items())}"


def _set(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    _variables_set.update(variables)


@dataclass(frozen=True)
class LaunchEnvironment:
    """The variables that torchrun sets for a process. One process without a launcher is rank 0 of 1.

    address, port: of the store through which ranks find each other. launcher_serves: whether torchrun, and not rank 0,
    runs that store.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "localhost"
    port: int = 0
    launcher_serves: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "LaunchEnvironment":
        """Read the variables that torchrun sets.

        Raises:
            LaunchError: some are set and some are missing, or one has an impossible value.
        """
        present = [name for name in _VARIABLES if name in environment]
        missing = [name for name in _VARIABLES if name not in environment]
        if not present:
            return cls()
        if missing:
            raise LaunchError(
                f"{', '.join(missing)} not set, but {', '.join(present)} is: start with torchrun, which sets all of "
                f"them, or unset {', '.join(present)} to run as one process"
            )
        numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        rank, world_size, local_rank, port = (_integer(environment, name) for name in numbers)
        if not 0 < world_size <= MOST_RANKS:
            raise LaunchError(f"WORLD_SIZE={world_size} is outside 1..{MOST_RANKS}: start with torchrun")
        for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, world_size)):
            if not 0 <= value < limit:
                raise LaunchError(f"{name}={value} is outside 0..WORLD_SIZE-1 (WORLD_SIZE={world_size})")
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is not a port: ports are 1..65535")
        launcher_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, local_rank, environment["MASTER_ADDR"], port, launcher_serves)

    def meet(self, timeout: float) -> Start | None:
        """Meet the other ranks of this start of the job, and return the start; None for one process. All ranks call
        this.

        timeout: seconds that a rank waits for another one.

        Raises:
            LaunchError: rank 0 did not start in time, or the store cannot be reached or served.
        """
        if self.world_size == 1:
            return None
        serve = self.rank == 0 and not self.launcher_serves
        store = connect(self.address, self.port, self.rank, serve=serve, timeout=timeout)
        return Start(store, self.rank, self.world_size, timeout)


def initialize(
    sizes: Mapping[str, int],
    device: DeviceChoice = "auto",
    timeout: float = 600.0,
    start: Start | None = None,
    zero_stage: int = 0,
) -> Mesh:
    """Join the world that torchrun started, or run as one process, and make its mesh.

    On GPUs this sets environment variables of CUDA and NCCL that are not set yet (docs/nccl.md), which only works
    before the process uses CUDA; rank 0 prints them on standard error.

    A world of one process needs no torch.distributed and creates none. Larger ones use gloo on the CPU and NCCL on
    GPUs, one process per GPU.

    Args:
        sizes: ranks along each dimension of `mesh.DIMENSIONS`; one that is left out has size 1.
        device: "auto" uses GPUs if there are any.
        timeout: seconds that a collective waits for its peers.
        start: the ranks of this start, if they have already met.
        zero_stage: ZeRO stage of the run; decides the number of hardware queues of a GPU.

    Raises:
        LaunchError: the environment is incomplete or wrong, the layout does not fit the world, there is no such
            device, or another rank did not start in time.
        ValueError: `sizes` is not a mapping from dimensions to positive numbers of ranks.

    Example:
        >>> from megapipe import initialize
        >>> initialize({}, device="cpu").world_size
        1
    """
    environment = LaunchEnvironment.read(os.environ)
    shape = MeshShape(sizes)
    if shape.world_size != environment.world_size:
        raise LaunchError(
            f"the layout {shape} needs {shape.world_size} processes, "
            f"but the launcher started {environment.world_size}: start {shape.world_size} "
            "processes in all with torchrun, or change the parallel sizes"
        )
    before = dict(_variables_set)
    variables = set_gpu_variables(device, environment.local_rank, sizes, zero_stage)
    if variables != before and environment.rank == 0:
        sys.stderr.write(f"{described_gpu_variables(variables)}\n")
    torch_device = choose_device(device, environment.local_rank)
    if environment.world_size > 1:
        if start is None:
            start = environment.meet(timeout)
            assert start is not None  # there are several ranks
            start.wait_for_all()
        dist.init_process_group(
            "nccl" if torch_device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=torch_device if torch_device.type == "cuda" else None,
            store=start.store,
            rank=environment.rank,
            world_size=environment.world_size,
        )
    return connected_mesh(shape, torch_device, timeout)


@contextmanager
def joined(
    sizes: Mapping[str, int], device: DeviceChoice = "auto", timeout: float = 600.0, start: Start | None = None
) -> Iterator[Mesh]:
    """Join the world as `initialize` does, and leave it at the end of the block.

    After an error, the process stays in the world until it ends: destroying a group may wait for an operation with a
    peer that is gone, and the error would be reported late.
    """
    yield initialize(sizes, device, timeout, start)
    shutdown()


def shutdown() -> None:
    """Leave the world and destroy every group. Does nothing for one process.

    Example:
        >>> from megapipe import shutdown
        >>> shutdown()
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def connected_mesh(shape: MeshShape, device: torch.device, timeout: float = 600.0) -> Mesh:
    """Return the mesh over the torch.distributed world of this process, or over this process alone.

    Args:
        timeout: seconds that a collective of the mesh's groups waits for its peers.
    """
    if not dist.is_initialized():
        return Mesh(shape, 0, device, _no_group)
    limit = timedelta(seconds=timeout)

    def messages(group: DistributedGroup) -> SharedMemoryExchange | None:
        return SharedMemoryExchange.within_host(group, timeout)

    def create(name: str, partition: Partition) -> Group | None:
        """Create a group of processes. torch's own `init_device_mesh` does not take a timeout."""
        if name == WORLD:
            process_group = dist.group.WORLD
        elif dist.get_backend() == "nccl":
            # All groups in one call, split from the world's communicator.
            process_group = dist.split_group(split_ranks=[list(ranks) for ranks in partition], timeout=limit)
        else:  # ranks must also create groups that they are not in
            groups = [dist.new_group(list(ranks), timeout=limit) for ranks in partition]
            own_groups = (group for group, ranks in zip(groups, partition, strict=True) if dist.get_rank() in ranks)
            process_group = next(own_groups, None)
        return None if process_group is None else DistributedGroup(name, process_group, messages)

    return Mesh(shape, dist.get_rank(), device, create)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's DeviceMesh for a mesh of processes, for DTensor, FSDP2 and distributed checkpoints.

    It has the dimensions that are larger than 1, and uses the groups that the mesh already has.
    """
    names = tuple(name for name in DIMENSIONS if mesh.size(name) > 1)
    groups = [group.process_group for group in map(mesh.group, names) if isinstance(group, DistributedGroup)]
    ranks = torch.arange(mesh.world_size).view([mesh.size(name) for name in names])
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=names)


def _no_group(name: str, partition: Partition) -> Group | None:
    raise LaunchError(f"the {name} group of ranks {partition[0]} needs more than one process")


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return whole_number(environment[name])
    except ValueError:
        raise LaunchError(f"{name}={environment[name]!r} is not an integer: start with torchrun") from None


def ranks_per_node(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host: all, unless the launcher says otherwise. Raises LaunchError."""
    if "LOCAL_WORLD_SIZE" not in environment:
        return world_size
    ranks = _integer(environment, "LOCAL_WORLD_SIZE")
    if ranks < 1:
        raise LaunchError(f"LOCAL_WORLD_SIZE={ranks} is below 1: use torchrun, or unset it")
    return ranks


def choose_device(choice: DeviceChoice, local_rank: int) -> torch.device:
    """Return the device of this rank, and make a GPU the current one. Raises LaunchError if it does not exist."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise LaunchError(
            f"LOCAL_RANK={local_rank} needs GPU {local_rank} but this host has {count}: "
            "start at most one process per GPU, or run with device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
