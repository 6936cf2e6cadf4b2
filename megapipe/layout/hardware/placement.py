"""The node of every rank, and so the groups that cross nodes and their links.

Ranks are numbered with tensor fastest, then context, pipeline and data, and fill a node before the next (Narayanan et
al. 2021, arXiv 2104.04473, section 3.2): tensor ranks stay inside a node if they fit.
"""

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from megapipe.config.errors import ConfigError, nearest
from megapipe.config.parallel import DIMENSIONS
from megapipe.layout.hardware.collectives import CollectiveTime, GroupLinks, collective_time
from megapipe.layout.hardware.description import Device, Hardware, IntraNodeLink, NodeGroup
from megapipe.spec.ops import Operation

Numbers = npt.NDArray[np.int64]


class Placement:
    """The ranks of a mesh on the nodes of a machine.

    Args:
        hardware: the machine.
        sizes: ranks along each dimension of `DIMENSIONS`; 1 by default.
        node_order: the node of each slot of consecutive ranks, numbers of all occupied nodes; by default in order.
            Nodes must have equal numbers of devices.

    Raises:
        ConfigError: an unknown dimension, a size below 1, more ranks than devices, no order of the nodes.
    """

    def __init__(self, hardware: Hardware, sizes: Mapping[str, int], node_order: Sequence[int] | None = None) -> None:
        for name, size in sizes.items():
            if name not in DIMENSIONS:
                known = ", ".join(DIMENSIONS)
                raise ConfigError(
                    f"unknown mesh dimension {name!r}{nearest(name, DIMENSIONS)}: the dimensions are {known}"
                )
            if size < 1:
                raise ConfigError(f"mesh dimension {name} has size {size}; it must be at least 1")
        self.hardware = hardware
        self.sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
        self.num_ranks = math.prod(self.sizes.values())
        nodes = hardware.nodes(self.num_ranks)
        reached = {key: node.reached for key, node in {id(node): node for node in nodes}.items()}
        self.nodes: tuple[NodeGroup, ...] = tuple(reached[id(node)] for node in nodes)
        self.node_order = tuple(range(len(self.nodes)) if node_order is None else node_order)
        self._check_order()
        ends = itertools.accumulate(self.nodes[node].devices_per_node for node in self.node_order)
        self._first_ranks = [0, *ends]
        self._groups_of, self._boundary_of = cache(self._find_groups), cache(self._find_boundary)
        self._sends = cache(self._find_send)

    def _check_order(self) -> None:
        if self.node_order == tuple(range(len(self.nodes))):
            return
        if sorted(self.node_order) != list(range(len(self.nodes))):
            raise ConfigError(
                f"node_order {list(self.node_order)} must contain each of the nodes 0 to {len(self.nodes) - 1} once"
            )
        if len({node.devices_per_node for node in self.nodes}) > 1:
            raise ConfigError("node_order needs nodes with equal numbers of devices; leave it out for this hardware")

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self.node_order[bisect_right(self._first_ranks, rank) - 1]

    def device_of(self, rank: int) -> Device:
        """Return the device of a rank."""
        return self.nodes[self.node_of(rank)].device

    @cached_property
    def memory_limits(self) -> tuple[float, ...]:
        """Return, by pipeline coordinate, the bytes of the smallest device of its ranks. State is equal on all
        replicas, and of equal size on all shards."""
        count = self.sizes["pipeline"]
        of_nodes = np.array([node.device.memory_bytes for node in self.nodes])
        if of_nodes.min() == of_nodes.max():
            return (float(of_nodes[0]),) * count
        at = self._partition([name for name in DIMENSIONS if name != "pipeline"])
        return tuple(of_nodes[self._node_of_rank[at]].min(axis=1).tolist())

    def partition(self, *names: str) -> list[list[int]]:
        """Return lists of ranks that differ only in the dimensions `names`."""
        ranks: list[list[int]] = self._partition(names).tolist()
        return ranks

    def _partition(self, names: Iterable[str]) -> Numbers:
        """Return `partition` as an array, shape [lists, members]."""
        free = [place for place, name in enumerate(DIMENSIONS) if name in names]
        fixed = [place for place in range(len(DIMENSIONS)) if place not in free]
        ranks = np.arange(self.num_ranks).reshape(*self.sizes.values()).transpose(*fixed, *free)
        return ranks.reshape(-1, math.prod(ranks.shape[len(fixed) :]))

    @cached_property
    def _node_of_rank(self) -> Numbers:
        sizes = [self.nodes[node].devices_per_node for node in self.node_order]
        return np.repeat(np.array(self.node_order), sizes)[: self.num_ranks]

    @cached_property
    def inside(self) -> dict[str, int] | None:
        """Return the ranks of each dimension on one node, if all nodes are equal and divided evenly; otherwise None.

        A group over several dimensions then has the product of these on each of its nodes.
        """
        if any(node is not self.nodes[0] for node in self.nodes):
            return None
        left, on_node = self.nodes[0].devices_per_node, {}
        for name in reversed(DIMENSIONS):
            size = self.sizes[name]
            on_node[name] = math.gcd(size, left)
            if on_node[name] not in (size, left):
                return None
            left //= on_node[name]
        return on_node

    @property
    def _even(self) -> dict[str, int] | None:
        """Return `inside` if links between nodes are equal too; otherwise None."""
        return self.inside if self.hardware.link_matrix is None else None

    def crosses(self, *names: str) -> bool:
        """Return whether any group over these dimensions spans nodes."""
        return any(group.crosses for group in self.groups(*names))

    def groups(self, *names: str) -> list[GroupLinks]:
        """Return the links of all groups over these dimensions, equal ones once, while all groups work at the same
        time."""
        return list(self._groups_of(names))

    def _find_groups(self, names: tuple[str, ...]) -> tuple[GroupLinks, ...]:
        if self._even is not None:
            return (self._even_group(self._even, names),)
        return self._links_of(self._node_of_rank[self._partition(names)])

    def slowest(self, operation: Operation, num_bytes: float, *names: str) -> CollectiveTime:
        """Return the time of a collective in all groups over these dimensions at the same time: that of the slowest
        group."""
        times = [collective_time(operation, num_bytes, group) for group in self.groups(*names)]
        return max(times, key=lambda time: time.seconds)

    def boundary(self, stage: int) -> list[GroupLinks]:
        """Return the links of the pairs that send from pipeline coordinate `stage` to the next, equal ones once, while
        all send.

        The last sends to the first, as in interleaved schedules. Activations go one way, gradients the other: the
        slower direction counts.
        """
        return list(self._boundary_of(stage))

    def _find_boundary(self, stage: int) -> tuple[GroupLinks, ...]:
        if self._even is not None:
            return (self._even_pair(self._even["pipeline"], stage),)
        pairs = self._partition(("pipeline",))[:, [stage, (stage + 1) % self.sizes["pipeline"]]]
        return self._links_of(self._node_of_rank[pairs])

    def send(self, num_bytes: float, stage: int) -> CollectiveTime:
        """Return the time of a message over all pairs of a boundary at the same time: that of the slowest pair. Zero
        with one stage."""
        return self._sends(num_bytes, stage)

    def _find_send(self, num_bytes: float, stage: int) -> CollectiveTime:
        if self.sizes["pipeline"] == 1:
            return CollectiveTime("none", 0.0, 0.0)
        times = [collective_time("send", num_bytes, pair) for pair in self.boundary(stage)]
        return max(times, key=lambda time: time.seconds)

    def _even_group(self, inside: Mapping[str, int], names: Iterable[str]) -> GroupLinks:
        node, chosen = self.nodes[0], set(names)
        local = math.prod(inside[name] for name in chosen)
        num_nodes = math.prod(self.sizes[name] for name in chosen) // local
        if num_nodes == 1:
            return GroupLinks((local,), node.inside)
        crossing = local * node.outside.of_device(node.devices_per_node)
        return GroupLinks((local,) * num_nodes, node.inside, crossing, node.outside.latency)

    def _even_pair(self, inside: int, stage: int) -> GroupLinks:
        node, following = self.nodes[0], (stage + 1) % self.sizes["pipeline"]
        if stage // inside == following // inside:
            return GroupLinks((2,), node.inside)
        crossing = node.outside.of_device(node.devices_per_node // inside)
        return GroupLinks((1, 1), node.inside, crossing, node.outside.latency)

    def _links_of(self, nodes: Numbers) -> tuple[GroupLinks, ...]:
        """Return the links of groups, each given as the nodes of its members in the ring's order, with members of one
        node adjacent; shape [groups, members]."""
        starts = np.ones(nodes.shape, dtype=bool)
        starts[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
        visited = nodes[starts]
        counts = np.diff(np.flatnonzero(starts), append=nodes.size)
        visits = starts.sum(axis=1)
        crosses = np.repeat(visits > 1, visits)
        active = np.bincount(visited[crosses], counts[crosses], len(self.nodes)).astype(np.int64)
        # Groups that visit equally busy nodes of the same kinds have the same links, unless there is a link matrix.
        kinds = visited if self.hardware.link_matrix is not None else self._kinds[visited]
        likeness = np.stack([counts, kinds, np.where(crosses, active[visited], 0)], axis=1)
        ends = visits.cumsum().tolist()
        distinct: dict[bytes, slice] = {}
        for first, stop in zip([0, *ends[:-1]], ends, strict=True):
            distinct.setdefault(likeness[first:stop].tobytes(), slice(first, stop))
        busy = Counter(dict(enumerate(active.tolist())))
        groups = (dict(zip(visited[at].tolist(), counts[at].tolist(), strict=True)) for at in distinct.values())
        return tuple(dict.fromkeys(self._group(Counter(each), busy) for each in groups))

    @cached_property
    def _kinds(self) -> Numbers:
        """Return the number of the kind of every node."""
        numbers: dict[int, int] = {}
        return np.array([numbers.setdefault(id(node), len(numbers)) for node in self.nodes])

    def _group(self, count: Counter[int], active: Counter[int]) -> GroupLinks:
        order = list(count)
        members = tuple(count.values())
        kinds = [self.nodes[node] for node in order]
        inside = _slower(kind.inside for kind in kinds)
        if len(order) == 1:
            return GroupLinks(members, inside)
        ring = zip(order, [*order[1:], order[0]], strict=True)
        crossing = min(self._flow(a, b, count, active) for a, b in ring)
        return GroupLinks(members, inside, crossing, max(kind.outside.latency for kind in kinds))

    def _flow(self, sender: int, receiver: int, count: Counter[int], active: Counter[int]) -> float:
        """Return the bytes per second from a group's members on one node to those on the next."""
        matrix = self.hardware.link_matrix
        measured = None if matrix is None else matrix[sender][receiver]
        return min(
            count[node] * self.nodes[node].outside.of_device(active[node], measured) for node in (sender, receiver)
        )


def _slower(links: Iterable[IntraNodeLink]) -> IntraNodeLink:
    """Return links with the highest latency and the lowest bandwidths of some links."""
    all_links = list(links)
    if all(link == all_links[0] for link in all_links):
        return all_links[0]
    return IntraNodeLink(
        max(link.latency for link in all_links),
        min(link.bandwidth for link in all_links),
        min(link.pair_bandwidth for link in all_links),
    )
