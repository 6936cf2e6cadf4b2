"""Links between the nodes of a job: what every node sends to every other one, for `link_matrix` of a hardware file.

All ranks of a node send at once, each to its like on the other node, so that a row counts all adapters together.
Disjoint pairs of nodes are measured side by side, in the rounds of a tournament: n nodes take n - 1 rounds of both
directions, or n if they are odd, and what pairs cost each other in a shared network is measured too.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Hardware, Network, NodeGroup
from megapipe.parallel.mesh import Mesh

REPEATS = 5
"""Medians over so many, behind a warm-up."""
MESSAGES = 4
"""Sent one behind the other for one answer."""


@dataclass(frozen=True)
class NodeLinks:
    """What nodes found of each other, in the order of their ranks.

    hosts, devices: name and ranks of each. latency: seconds of a small message. bandwidth: bytes per second from node
    to node, 0 on the diagonal.
    """

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    latency: float
    bandwidth: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its node, numbered from 0, the node's name, and its own number there."""

    node: int
    host: str
    local: int

    @classmethod
    def of_this_process(cls) -> "Place":
        """As torchrun says."""
        return cls(int(os.environ["GROUP_RANK"]), socket.gethostname(), int(os.environ["LOCAL_RANK"]))


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which each node has one partner at most: the circle method."""
    seats = [*range(nodes), *([None] if nodes % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(one, two) for one, two in pairs if one is not None and two is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def measure_node_links(mesh: Mesh, own: Place, num_bytes: int) -> NodeLinks:
    """Send `num_bytes` a message between all pairs of nodes. A collective call of all ranks.

    Raises:
        ConfigError: there is one node alone, or nodes have unlike numbers of ranks.
    """
    nodes = _nodes(mesh.world.all_gather_object(own))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=mesh.device)
    mine = own.node
    latencies: list[float] = []
    rates: dict[tuple[int, int], float] = {}
    for pairs in rounds(len(nodes)):
        for one, two in (each for pair in pairs for each in (pair, pair[::-1]) if mine in pair):
            peer = nodes[two if mine == one else one][own.local][0]
            mesh.world.barrier()
            latency = _timed(mesh, buffer[:1], peer, sends=mine == one, messages=1) / 2
            mesh.world.barrier()
            seconds = _timed(mesh, buffer, peer, sends=mine == one, messages=MESSAGES)
            if mine == one:
                latencies.append(latency)
                rates[one, two] = MESSAGES * num_bytes / max(seconds - latency, 1e-9)
        if not any(mine in pair for pair in pairs):
            for _ in range(4):  # of the others' two measurements in both directions
                mesh.world.barrier()
    every = mesh.world.all_gather_object((latencies, rates))
    matrix = [[0.0] * len(nodes) for _ in nodes]
    for _, found in every:
        for (one, two), rate in found.items():
            matrix[one][two] += rate
    return NodeLinks(
        hosts=tuple(members[0][1].host for members in nodes),
        devices=tuple(len(members) for members in nodes),
        latency=median(each for found, _ in every for each in found),
        bandwidth=tuple(map(tuple, matrix)),
    )


def with_node_links(hardware: Hardware, found: NodeLinks) -> Hardware:
    """The machine with the nodes that were measured, and their links.

    A single group gets their number, and what they reach: the median, since `link_matrix` says the rest.

    Raises:
        ConfigError: the nodes are not those of the hardware.
    """
    groups, nodes = hardware.groups, len(found.hosts)
    if len(groups) == 1:
        between = median(value for i, row in enumerate(found.bandwidth) for j, value in enumerate(row) if i != j)
        outside = Network(found.latency, between, groups[0].outside.adapters)
        groups = (replace(groups[0], num_nodes=nodes, outside=outside),)
    supply: list[NodeGroup] = [group for group in groups for _ in range(group.num_nodes or 0)]
    expected = tuple(group.devices_per_node for group in supply)
    if expected != found.devices:
        raise ConfigError(
            f"hardware {hardware.name!r} has {len(expected)} nodes of {_told(expected)} devices, but {nodes} nodes of "
            f"{_told(found.devices)} ranks were started; start a rank for every device, or correct the file"
        )
    return replace(hardware, groups=groups, link_matrix=found.bandwidth)


def _told(counts: Sequence[int]) -> str:
    return ", ".join(str(each) for each in dict.fromkeys(counts))


def _nodes(places: Sequence[Place]) -> list[list[tuple[int, Place]]]:
    """Ranks by node and by their number there."""
    found: dict[int, list[tuple[int, Place]]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place.node, []).append((rank, place))
    sizes = [len(members) for members in found.values()]
    if len(found) < 2:
        raise ConfigError("all ranks are on one node; start two or more nodes to measure the links between them")
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"nodes were started with {_told(sizes)} ranks; start as many on each, so that every rank has a partner"
        )
    return [sorted(found[node], key=lambda each: each[1].local) for node in sorted(found)]


def _timed(mesh: Mesh, buffer: Tensor, peer: int, *, sends: bool, messages: int) -> float:
    """Median seconds until the peer, which has all messages, has answered."""
    answer = buffer[:1].clone()
    there: Callable[..., object] = dist.send if sends else dist.recv
    back: Callable[..., object] = dist.recv if sends else dist.send
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(messages):
            there(buffer, peer)
        back(answer, peer)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
