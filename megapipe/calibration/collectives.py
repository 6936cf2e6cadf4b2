"""Measure collectives and messages between the ranks of a machine, and links between the nodes of a job.

Collectives are measured in the same situation as in layers: after computation, which ends at slightly different times
on the ranks, with other data in the caches and a peer that must wake up. Without computation between them, collectives
take only a fraction of this time.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.calibration.layers import Cell, LayerRun
from megapipe.config import ConfigError
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, MeasuredCollective, Network, NodeGroup, Transport
from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import Group
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.links import Edge, LinkEnd
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind, make_links
from megapipe.spec.ops import Operation
from megapipe.training.device import wait_for

SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)
"""Sizes of the whole buffer in bytes."""
REPEATS = 7
WORK = 512
"""Size of the matrix product before every collective, which takes milliseconds on a CPU core."""
LINK_TIMEOUT = 120.0
MIN_SECONDS = 1e-7
"""Minimum time of a call in seconds, because noise could make the difference of two times zero or negative."""


class Call(NamedTuple):
    """Time of a call: seconds on the slowest rank, and processor seconds, mean over the ranks."""

    seconds: float
    processor: float


Timings = dict[int, Call]
"""Times of calls by bytes."""


def measured_collectives(mesh: Mesh) -> dict[Operation, Timings]:
    """Return the times of each operation among all ranks of the mesh. A collective call."""
    left, right, out = (torch.ones(WORK, WORK, device=mesh.device) for _ in range(3))
    work = partial(torch.mm, left, right, out=out)
    return {
        operation: {size: _timed(mesh, partial(call, mesh.world, _buffer(mesh, size)), size, work) for size in SIZES}
        for operation, call in _CALLS.items()
    }


def measured_sends(mesh: Mesh, kinds: Sequence[LinkKind]) -> dict[str, Timings]:
    """Return the times of messages between two ranks (half a round trip) by transport. A collective call of both."""
    pair = connected_mesh(MeshShape({"pipeline": 2}), mesh.device, LINK_TIMEOUT)
    edges = [Edge(0, 1, max(SIZES)), Edge(1, 0, max(SIZES))]
    timings: dict[str, Timings] = {}
    for kind in kinds:
        links = make_links(pair, edges, kind, LINK_TIMEOUT)
        there, back = links[edges[0]], links[edges[1]]
        trip = partial(_round_trip, pair, there, back)
        trips = {size: _timed(mesh, partial(trip, _buffer(pair, size)), size) for size in SIZES}
        timings[kind] = {size: Call(call.seconds / 2, call.processor / 2) for size, call in trips.items()}
    return timings


def fitted(operation: Operation, ranks: int, over: Transport, timings: Timings) -> MeasuredCollective:
    """Fit latency and bandwidth to measured seconds by size.

    This minimizes the squares of relative errors, so that small messages count as much as large ones. Neither result
    is negative. `busy` is the value for the largest size, and 0 for GPUs, whose collectives do not use the processor.
    """
    sizes = np.array(list(timings), dtype=np.float64)
    times = np.array([each.seconds for each in timings.values()])
    weights = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    latency, per_byte = np.linalg.lstsq(weights, np.ones_like(times), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        # The best fit without a latency is a line through the origin.
        latency, per_byte = 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    largest = timings[max(timings)]
    busy = 0.0 if over == "nccl" else largest.processor / largest.seconds
    return MeasuredCollective(operation, ranks, over, float(latency), float(1.0 / per_byte), busy)


def _timed(mesh: Mesh, call: Callable[[], object], size: int, work: Callable[[], object] | None = None) -> Call:
    """Return medians over several loops of calls. size: bytes of a call; loops of short calls have more of them. work:
    runs before every call; its own time is subtracted."""
    calls = 20 if size <= 2**16 else 4
    loops = [(call,)] if work is None else [(work, call), (work,)]
    # The first round warms up.
    rounds = [[_once(mesh, loop, calls) for loop in loops] for _ in range(REPEATS + 1)]
    whole, *work_alone = np.median(rounds[1:], axis=0)
    call_times = mesh.world.all_gather_object(np.maximum(whole - sum(work_alone), MIN_SECONDS).tolist())
    return Call(max(each for each, _ in call_times), sum(each for _, each in call_times) / len(call_times))


def _once(mesh: Mesh, loop: Sequence[Callable[[], object]], calls: int) -> Call:
    """Return the mean time of a call in one loop."""
    mesh.world.barrier()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        for function in loop:
            function()
    wait_for(mesh.device)
    return Call((time.perf_counter() - start) / calls, (time.process_time() - used) / calls)


def _buffer(mesh: Mesh, size: int) -> Tensor:
    return torch.zeros(size // 4, dtype=torch.float32, device=mesh.device)


_CALLS: dict[Operation, Callable[[Group, Tensor], object]] = {
    "all_reduce": lambda group, whole: group.all_reduce(whole),
    "all_gather": lambda group, whole: group.gather_into(whole, group.own_part(whole)).wait(),
    "reduce_scatter": lambda group, whole: group.reduce_into_part(whole).wait(),
    "all_to_all": lambda group, whole: all_to_all(whole.view(group.size, -1), group),
}


def _round_trip(mesh: Mesh, there: LinkEnd, back: LinkEnd, tensor: Tensor) -> None:
    if mesh.rank == 0:
        there.send(tensor).wait()
        back.receive(tensor).wait()
    else:
        there.receive(tensor).wait()
        back.send(tensor).wait()


@dataclass(frozen=True)
class Together:
    """Measurement of `ranks` ranks at once. factor: time of a step relative to that of a single rank."""

    ranks: int
    factor: float
    collectives: tuple[MeasuredCollective, ...]


def measure_together(mesh: Mesh, config: PretrainConfig, micro_size: int, steps: int) -> Together:
    """Measure the slowdown of ranks that train at the same time, and their collectives. All ranks must call this."""
    run = LayerRun(config, Cell(1, 1, micro_size), mesh.device)
    run.step()
    factor = _factor(mesh, run, steps)
    over: Transport = "nccl" if mesh.device.type == "cuda" else "gloo"
    rows = [fitted(name, mesh.world_size, over, each) for name, each in measured_collectives(mesh).items()]
    if mesh.world_size == 2:
        kinds: tuple[LinkKind, ...] = ("nccl",) if over == "nccl" else _link_kinds(config)
        sends = measured_sends(mesh, kinds)
        rows += [fitted("send", 2, kind, each) for kind, each in sends.items()]  # type: ignore[arg-type]
    return Together(mesh.world_size, factor, tuple(rows))


def _factor(mesh: Mesh, run: LayerRun, steps: int) -> float:
    """Return the time of a step while all ranks run, relative to a rank that runs while the others wait: the mean over
    the ranks, at least 1.

    The two times are measured alternately, so that a change of the machine's load affects both.
    """
    alone, together = [], []
    for _ in range(steps):
        mesh.world.barrier()
        if mesh.rank == 0:
            alone.append(run.step())
        mesh.world.barrier()
        start = time.perf_counter()
        run.step()
        run.step()  # two steps, because ranks do not start and end at exactly the same time
        together.append((time.perf_counter() - start) / 2)
    times = mesh.world.all_gather_object((median(alone) if alone else None, median(together)))
    alone_seconds = next(each for each, _ in times if each is not None)
    return max(1.0, sum(seconds for _, seconds in times) / len(times) / alone_seconds)


def _link_kinds(config: PretrainConfig) -> tuple[LinkKind, ...]:
    """Return the kinds of links between processes of one host, starting with the kind that the run would use."""
    return ("gloo", "shared_memory") if config.parallel.links == "gloo" else ("shared_memory", "gloo")


EXCHANGES = 5
"""Number of measurements per median, after a warm-up."""
MESSAGES = 4
"""Number of consecutive messages before the peer answers."""


@dataclass(frozen=True)
class NodeLinks:
    """Measured links between nodes, in the order of their ranks.

    hosts, devices: name and number of ranks of each node. latency: seconds of a small message. bandwidth: bytes per
    second from node to node, 0 on the diagonal.
    """

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    latency: float
    bandwidth: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Place:
    """Place of a rank: index of its node, name of the node, and index of the rank within the node."""

    node: int
    host: str
    local: int

    @classmethod
    def of_this_process(cls) -> "Place":
        """Return the place of this process, from the variables that torchrun sets."""
        return cls(int(os.environ["GROUP_RANK"]), socket.gethostname(), int(os.environ["LOCAL_RANK"]))


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return every pair of nodes once, in rounds in which each node has at most one partner (circle method)."""
    seats = [*range(nodes), *([None] if nodes % 2 else [])]
    all_rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        all_rounds.append([(one, two) for one, two in pairs if one is not None and two is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return all_rounds


def measure_node_links(mesh: Mesh, place: Place, num_bytes: int) -> NodeLinks:
    """Measure messages of `num_bytes` between all pairs of nodes. A collective call of all ranks.

    All ranks of a node send at once, each to the rank with the same index on the other node, so that the bandwidth is
    that of all adapters together. Disjoint pairs of nodes are measured at the same time, which includes their effect
    on each other in a shared network: n nodes take n - 1 rounds of both directions, or n if n is odd.

    place: place of this rank.

    Raises:
        ConfigError: there is only one node, or the nodes have different numbers of ranks.
    """
    nodes = _nodes(mesh.world.all_gather_object(place))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=mesh.device)
    node = place.node
    latencies: list[float] = []
    rates: dict[tuple[int, int], float] = {}
    for pairs in rounds(len(nodes)):
        for one, two in (each for pair in pairs for each in (pair, pair[::-1]) if node in pair):
            peer = nodes[two if node == one else one][place.local][0]
            mesh.world.barrier()
            latency = _exchanged(mesh, buffer[:1], peer, sends=node == one, messages=1) / 2
            mesh.world.barrier()
            seconds = _exchanged(mesh, buffer, peer, sends=node == one, messages=MESSAGES)
            if node == one:
                latencies.append(latency)
                rates[one, two] = MESSAGES * num_bytes / max(seconds - latency, 1e-9)
        if not any(node in pair for pair in pairs):
            # For the two measurements in both directions of the other nodes.
            for _ in range(4):
                mesh.world.barrier()
    results = mesh.world.all_gather_object((latencies, rates))
    matrix = [[0.0] * len(nodes) for _ in nodes]
    for _, rates_of_rank in results:
        for (one, two), rate in rates_of_rank.items():
            matrix[one][two] += rate
    return NodeLinks(
        hosts=tuple(members[0][1].host for members in nodes),
        devices=tuple(len(members) for members in nodes),
        latency=median(each for own, _ in results for each in own),
        bandwidth=tuple(map(tuple, matrix)),
    )


def with_node_links(hardware: Hardware, links: NodeLinks) -> Hardware:
    """Return the machine with the measured nodes and their links.

    If the machine has a single group, the number of nodes and the median bandwidth are set in the group. `link_matrix`
    has all bandwidths.

    Raises:
        ConfigError: the nodes do not match the nodes of the hardware.
    """
    groups, nodes = hardware.groups, len(links.hosts)
    if len(groups) == 1:
        between = median(value for i, row in enumerate(links.bandwidth) for j, value in enumerate(row) if i != j)
        outside = Network(links.latency, between, groups[0].outside.adapters)
        groups = (replace(groups[0], num_nodes=nodes, outside=outside),)
    supply: list[NodeGroup] = [group for group in groups for _ in range(group.num_nodes or 0)]
    expected = tuple(group.devices_per_node for group in supply)
    if expected != links.devices:
        raise ConfigError(
            f"hardware {hardware.name!r} has {len(expected)} nodes of {_listed(expected)} "
            f"devices, but {nodes} nodes of {_listed(links.devices)} ranks were started; "
            "start a rank for every device, or correct the file"
        )
    return replace(hardware, groups=groups, link_matrix=links.bandwidth)


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(counts)))


def _nodes(places: Sequence[Place]) -> list[list[tuple[int, Place]]]:
    """Return the ranks and places of every node, sorted by the index of the rank within the node."""
    nodes: dict[int, list[tuple[int, Place]]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node, []).append((rank, place))
    sizes = [len(members) for members in nodes.values()]
    if len(nodes) < 2:
        raise ConfigError("all ranks are on one node; start two or more nodes to measure the links between them")
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"nodes were started with {_listed(sizes)} ranks; "
            "start the same number on each, so that every rank has a partner"
        )
    return [sorted(nodes[node], key=lambda each: each[1].local) for node in sorted(nodes)]


def _exchanged(mesh: Mesh, buffer: Tensor, peer: int, *, sends: bool, messages: int) -> float:
    """Return the median seconds until the peer has received all messages and answered."""
    answer = buffer[:1].clone()
    there: Callable[..., object] = dist.send if sends else dist.recv
    back: Callable[..., object] = dist.recv if sends else dist.send
    times = []
    for _ in range(EXCHANGES + 1):
        start = time.perf_counter()
        for _ in range(messages):
            there(buffer, peer)
        back(answer, peer)
        wait_for(mesh.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
