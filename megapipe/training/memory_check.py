"""Compare the memory that a run needs with the free memory, before any parameter is allocated.

The need is the exact prediction that dry runs print (`layout.prediction`): persistent state, message buffers, and the
peak within a step. It excludes the overhead of the framework (CUDA, NCCL, allocator fragmentation).
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megapipe.config import ConfigError
from megapipe.config.command_line import bytes_text
from megapipe.config.files import flat
from megapipe.config.parallel import ScheduleConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.trace import this_host
from megapipe.layers.attention import has_amx
from megapipe.layout.batch_plan import data_parallel_size, mesh_shape
from megapipe.layout.prediction import predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import lowered_schedule
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.registry import find_generator
from megapipe.training.validation import validate

SUGGESTIONS = 3
MOST_RANKS = 4096
"""Largest number of ranks that a suggestion asks for."""
UNLIMITED = 2**60
"""A cgroup limit of this many bytes or more means that there is no limit: version 1 reports a number near 2^63."""


class Free(NamedTuple):
    """Free bytes of a device or a host, and a description of the limit that they follow from."""

    num_bytes: int
    limit: str


class Need(NamedTuple):
    """Bytes that one rank allocates on its device and in the memory of its host."""

    device: int
    host: int


@dataclass(frozen=True)
class Rank:
    """Need of one rank, on its device and its host. free_on_device, free_on_host: None if unknown.

    device_id, host_id: distinguish devices and hosts with the same name: GPUs that are each the only visible one of a
    process, containers with separate limits, and hosts that share a name.
    """

    host: str
    device: str
    need: Need
    free_on_device: Free | None
    free_on_host: Free | None
    device_id: str = ""
    host_id: str = ""


def check_memory(config: PretrainConfig, mesh: Mesh, say: Callable[[str], None]) -> None:
    """Refuse a run that does not fit, or warn, depending on training.memory_check. A collective call.

    Call it before the model is built, because the run's own tensors must not reduce the free memory.

    Raises ConfigError, the same on every rank.
    """
    device = mesh.device
    need = needed(config, mesh.world_size, mesh.rank, device.type)
    free = Free(int(torch.cuda.mem_get_info(device)[0]), "") if device.type == "cuda" else None
    device_id = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    host_id = this_host() + _cgroup_namespace()
    mine = Rank(socket.gethostname(), str(device), need, free, free_on_host(), device_id, host_id)
    ranks: list[Rank] = mesh.world.all_gather_object(mine)
    problem = memory_problem(config, ranks) if mesh.rank == 0 else None
    problem = mesh.world.all_gather_object(problem)[0]
    if problem is None:
        return
    if config.training.memory_check == "warn":
        say(f"warning: {problem}")
        return
    raise ConfigError(f"{problem}; to train anyway, set --training.memory_check warn")


def needed(config: PretrainConfig, world_size: int, rank: int, device: str) -> Need:
    """Predict one rank's bytes. device: "cpu" or "cuda"; on a CPU, the device is the host.

    With offload.activations auto, which decides after this check, only persistent state and messages are counted.
    """
    return next(_needs(config, world_size, device, [rank]))


def _needs(config: PretrainConfig, world_size: int, device: str, ranks: Sequence[int]) -> Iterator[Need]:
    config = _with(config, {"parallel": {"data": data_parallel_size(config, world_size)}})
    undecided = config.offload.activations == "auto"
    if undecided:
        config = _with(config, {"offload": {"activations": "none"}})
    schedule = lowered_schedule(config, StageLayout.of(config))
    amx = device == "cpu" and has_amx()
    for rank in ranks:
        predicted = predict_rank(config, schedule, rank, device=device, amx=amx)
        in_host = predicted.in_host()
        held = predicted.state().total - in_host + predicted.messages if undecided else predicted.device_bytes()
        yield Need(0, held + in_host) if device == "cpu" else Need(held, in_host)


def memory_problem(config: PretrainConfig, ranks: Sequence[Rank]) -> str | None:
    """Return one line about the device or host that lacks the most memory, with up to three changes that make the run
    fit; None if every rank fits."""
    worst = max(_places(ranks), key=lambda place: place.missing, default=None)
    if worst is None or worst.missing <= 0:
        return None
    changes = [f"({number}) {change}" for number, change in enumerate(suggestions(config, ranks), start=1)]
    advice = (
        f"to make it fit, any one of: {', '.join(changes)}"
        if changes
        else ("none of the changes that were tried makes it fit")
    )
    return f"training needs {worst.description}; {advice}"


class _Place(NamedTuple):
    """A device or a host that ranks share. missing: needed minus free bytes, negative if it fits."""

    description: str
    missing: int


def _places(ranks: Sequence[Rank], needs: Sequence[Need] | None = None) -> Iterator[_Place]:
    """Yield every device and host whose free memory is known. needs: one per rank; by default those in `ranks`."""
    needed: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    free: dict[tuple[str, str, str], Free] = {}
    for rank, need in zip(ranks, needs or [each.need for each in ranks], strict=True):
        for device, identity, num_bytes, free_memory in (
            (rank.device, rank.device_id, need.device, rank.free_on_device),
            ("", rank.host_id, need.host, rank.free_on_host),
        ):
            if num_bytes and free_memory is not None:
                place = rank.host, device, identity
                needed[place].append(num_bytes)
                free[place] = min(free_memory, free.get(place, free_memory))
    for place, sizes in needed.items():
        free_memory, (host, device, _) = free[place], place
        sharing = f" for {len(sizes)} ranks" if len(sizes) > 1 else ""
        where = f"{device} of host {host}" if device else f"host {host}"
        yield _Place(
            f"{bytes_text(sum(sizes))} on {where}{sharing}, and "
            f"{bytes_text(free_memory.num_bytes)} are free{free_memory.limit and f' ({free_memory.limit})'}",
            sum(sizes) - free_memory.num_bytes,
        )


def suggestions(config: PretrainConfig, ranks: Sequence[Rank]) -> list[str]:
    """Return up to three changes, each of another kind, with which every rank is predicted to fit."""
    fitting_changes = (next((each for each in kind if fits(each, ranks)), None) for kind in _kinds(config, len(ranks)))
    changes = (each.flags(config, len(ranks)) for each in fitting_changes if each is not None)
    return list(islice(changes, SUGGESTIONS))


@dataclass(frozen=True)
class Change:
    """A changed configuration. times: factor by which the number of ranks, and of hosts or devices, grows."""

    config: PretrainConfig
    times: int = 1

    def flags(self, before: PretrainConfig, world_size: int) -> str:
        """Return the flags that make the change."""
        old, new = flat(asdict(before)), flat(asdict(self.config))
        flags = " ".join(f"--{name} {_flag(value)}" for name, value in new.items() if value != old[name])
        more_ranks = f" on {world_size * self.times:,} ranks, {self.times} times the hosts or devices"
        return flags + (more_ranks if self.times > 1 else "")


def fits(change: Change, ranks: Sequence[Rank]) -> bool:
    """Return whether a change is valid and every rank fits. Added hosts are assumed to be like the fullest one."""
    world_size = len(ranks) * change.times
    try:
        validate(change.config, world_size)
        return _fits(change.config, world_size, ranks)
    except ValueError:  # raised by the rules of the configuration, the schedule or its costs
        return False


def _fits(config: PretrainConfig, world_size: int, ranks: Sequence[Rank]) -> bool:
    device = torch.device(ranks[0].device).type
    shape = mesh_shape(config, world_size)
    # Ranks with the same pipeline coordinate need the same memory, except for Muon's shards of whole matrices.
    if config.optimizer.name == "muon" and config.zero.stage > 0:
        checked_ranks = list(range(world_size))
    else:
        coordinates = range(shape.sizes["pipeline"])
        checked_ranks = [shape.rank_of({"pipeline": coordinate}) for coordinate in coordinates]
    free = [each for rank in ranks for each in (rank.free_on_device, rank.free_on_host) if each is not None]
    max_free = max((each.num_bytes for each in free), default=UNLIMITED)
    needs: list[Need] = []
    for need in _needs(config, world_size, device, checked_ranks):
        if max(need) > max_free:
            return False
        needs.append(need)
    if world_size > len(ranks):
        needs = [Need(max(each.device for each in needs), max(each.host for each in needs))] * len(ranks)
    elif len(needs) < world_size:
        needs = [needs[shape.coordinates(rank)["pipeline"]] for rank in range(world_size)]
    return all(each.missing <= 0 for each in _places(ranks, needs))


def _kinds(config: PretrainConfig, world_size: int) -> Iterator[Iterator[Change]]:
    """Yield kinds of changes, those that cost the least speed first; within a kind, the smallest change first."""

    def changes(group: str, *values: dict[str, Any]) -> Iterator[Change]:
        return (Change(_with(config, {group: each})) for each in values)

    parallel, training = config.parallel, config.training
    tensor, pipeline = parallel.tensor, parallel.pipeline
    spare = world_size // (tensor * pipeline * parallel.context)
    small = [each for each in range(config.batch.micro_size - 1, 0, -1) if config.batch.micro_size % each == 0]
    more = [each for each in range(2, spare + 1) if spare % each == 0]
    yield changes("zero", *({"stage": each} for each in range(config.zero.stage + 1, 4)))
    if config.recompute.method != "full":
        methods = ("full",) if config.recompute.method == "selective" else ("selective", "full")
        yield changes("recompute", *({"method": each} for each in methods))
    yield changes("batch", *({"micro_size": each} for each in small))
    if training.precision == "fp32":
        yield changes("training", {"precision": "bf16"})
    plain = find_generator(ScheduleConfig.name)
    if config.schedule.name not in (plain.name, plain.looped) and not config.schedule.file:
        yield changes("schedule", {"name": plain.name, "chunks": None})
    for name, size in (("tensor", tensor), ("pipeline", pipeline)):
        yield changes(
            "parallel",
            *({name: size * each, "data": parallel.data and max(1, parallel.data // each)} for each in more),
        )
    smallest: dict[str, dict[str, Any]] = {
        "recompute": {"method": "full", "num_blocks": None},
        "batch": {"micro_size": 1},
        "zero": {"stage": 3 if spare > 1 else config.zero.stage},
    }
    yield iter([Change(_with(config, smallest))])
    factors = list(takewhile(lambda each: each * world_size <= MOST_RANKS, (2**power for power in range(1, 13))))
    yield (Change(_with(config, {"parallel": {"tensor": tensor * each}}), each) for each in factors)
    layers = takewhile(lambda each: each >= 1, (config.model.num_layers // 2**power for power in range(1, 12)))
    yield changes("model", *({"num_layers": each} for each in layers))
    yield (Change(_with(config, {"parallel": {"pipeline": pipeline * each}}), each) for each in factors)
    yield (
        Change(_with(config, smallest | {"parallel": {"tensor": 8, "pipeline": pipeline * each}}), 8 // tensor * each)
        for each in factors
        if 8 % tensor == 0 and 8 // tensor * each * world_size <= MOST_RANKS
    )
    lengths = takewhile(lambda each: each >= 64, (config.data.sequence_length // 2**power for power in range(1, 12)))
    yield changes("data", *({"sequence_length": each} for each in lengths))


def _with(config: PretrainConfig, groups: Mapping[str, Mapping[str, Any]]) -> PretrainConfig:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def _flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def free_on_host(root: Path = Path("/")) -> Free | None:
    """Return the memory that this process can still allocate on its host: the minimum of what the kernel reports as
    available and what each of its cgroups (version 1 or 2) leaves. None if the system reports nothing.

    root: root of the file system with proc and sys.
    """
    available = (line.split() for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:"))
    limits = [Free(int(size) * 1024, "") for _, size, *_ in available]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _cgroup(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            limits += _cgroup(root / "sys/fs/cgroup/memory", path, *names)
    return min(limits, default=None)


def _cgroup(mount: Path, path: str, limit_name: str, usage_name: str, prefix: str) -> Iterator[Free]:
    """Yield the free bytes of a cgroup and of all its parents. prefix: of the keys in memory.stat of file pages, which
    the kernel reclaims on demand."""
    reclaimed_names = f"{prefix}active_file", f"{prefix}inactive_file"
    cgroup = mount / path.strip("/")
    for folder in (cgroup, *cgroup.parents):
        if not folder.is_relative_to(mount):
            return
        limit, usage = (next(iter(_lines(folder / name)), "") for name in (limit_name, usage_name))
        if not (limit.isdigit() and usage.isdigit()) or int(limit) >= UNLIMITED:
            continue
        stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
        used = max(0, int(usage) - sum(int(stat.get(name, 0)) for name in reclaimed_names))
        yield Free(max(0, int(limit) - used), f"its cgroup allows {bytes_text(int(limit))}")


def _cgroup_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/cgroup")
    except OSError:
        return ""


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
