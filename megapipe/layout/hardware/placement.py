"""The node of every rank, and so the links of the groups that cross nodes; times of collectives over these links; and
the best order of the nodes.

Ranks are numbered with tensor fastest, then context, pipeline and data, and fill a node before the next (Narayanan et
al. 2021, arXiv 2104.04473, section 3.2): tensor ranks stay inside a node if they fit.

Collectives run over a single ring, or over rings inside nodes that are joined by rings between nodes. n members, M
bytes of the whole buffer as `spec.ops.Exchange` counts them, one latency per step. A ring forwards M / n bytes per
step, over every link at once, so its slowest link sets the pace; an all-gather or reduce-scatter takes n - 1 steps
(Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521, section 4.1), an all-reduce both. Between nodes,
the members with the same local index form a ring, and all rings share the node's adapters: an all-reduce takes
2 (n_in - 1) M / (n_in bw_in) + 2 (n_out - 1) M / (n_out bw_out), Pipette's form (arXiv 2405.18093) with bw_out the
bandwidth of all members of a node together. A library uses the faster algorithm, and so does `collective_time`.

If each link between nodes has been measured, the order in which ranks fill the nodes matters. Pipette's search over
orders of servers (arXiv 2405.18093): the cost is the slowest pipeline's messages plus the slowest ring of gradients;
small machines are searched in full, larger ones by simulated annealing with its moves.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megapipe.config import ConfigError
from megapipe.config.parallel import DIMENSIONS, MeshShape
from megapipe.layout.hardware.description import Hardware, IntraNodeLink, NodeGroup
from megapipe.layout.stages import cached_method
from megapipe.schedules.actions import Ints
from megapipe.spec.ops import Exchange, Operation


@dataclass(frozen=True)
class GroupLinks:
    """The links of a group of ranks.

    members: on each node that it touches, in the ring's order. inside: links of the slowest of these nodes. crossing:
    bytes per second that its members on one node together send to the next node, at the ring's slowest such step;
    crossing_latency: seconds per message there. Both are 0 if the group is on one node.
    """

    members: tuple[int, ...]
    inside: IntraNodeLink
    crossing: float = 0.0
    crossing_latency: float = 0.0

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return sum(self.members)

    @property
    def crosses(self) -> bool:
        """Whether the group spans nodes."""
        return len(self.members) > 1


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of one call, in its terms: latencies of all steps, and bytes over bandwidths."""

    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Sum of both."""
        return self.latency + self.transfer

    def times(self, calls: int) -> "CollectiveTime":
        """Return the time of this number of calls, one after the other."""
        return CollectiveTime(self.latency * calls, self.transfer * calls)


def ring_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of an all-reduce, reduce-scatter or all-gather in one ring through all members."""
    passes = 2 if operation == "all_reduce" else 1
    steps = passes * (group.size - 1)
    bandwidth, latency = _slowest(group)
    return CollectiveTime(steps * latency, steps * num_bytes / group.size / bandwidth)


def hierarchical_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time with rings inside the nodes and rings between them.

    group: with the same number of members on every node.
    """
    passes = 2 if operation == "all_reduce" else 1
    inside, outside = group.members[0], len(group.members)
    steps_in, steps_out = passes * (inside - 1), passes * (outside - 1)
    transfer = steps_in * num_bytes / inside / group.inside.of_ring(inside)
    if outside > 1:
        transfer += steps_out * num_bytes / outside / group.crossing
    latency = steps_in * group.inside.latency + steps_out * group.crossing_latency
    return CollectiveTime(latency, transfer)


def all_to_all_time(num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time in which every member sends M / n bytes to every other; links inside and between nodes work in
    parallel."""
    share, most = num_bytes / group.size, max(group.members)
    transfers = [(most - 1) * share / group.inside.of_ring(most)]
    if group.crosses:
        transfers.append(max(local * (group.size - local) for local in group.members) * share / group.crossing)
    latency = _slowest(group)[1]
    return CollectiveTime((group.size - 1) * latency, max(transfers))


def send_time(num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of a message from one rank to another: `group` is the pair."""
    bandwidth = group.crossing if group.crosses else group.inside.pair_bandwidth
    latency = group.crossing_latency if group.crosses else group.inside.latency
    return CollectiveTime(latency, num_bytes / bandwidth)


@lru_cache(maxsize=4096)
def collective_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of one call with the faster algorithm, or the measured time of such calls inside a node; zero
    for a group of one."""
    if group.size == 1:
        return CollectiveTime(0.0, 0.0)
    measured = None if group.crosses else group.inside.measured(operation, group.size)
    if measured is not None:
        return CollectiveTime(measured.latency, num_bytes / measured.bandwidth)
    if operation == "send":
        return send_time(num_bytes, group)
    if operation == "all_to_all":
        return all_to_all_time(num_bytes, group)
    ways = [ring_time(operation, num_bytes, group)]
    if group.crosses and group.members[0] > 1 and len(set(group.members)) == 1:
        ways.append(hierarchical_time(operation, num_bytes, group))
    return min(ways, key=lambda way: way.seconds)


def _longest(operation: Operation, num_bytes: float, groups: Iterable[GroupLinks]) -> CollectiveTime:
    """Return the time of one call in all groups at the same time: that of the slowest group."""
    return max((collective_time(operation, num_bytes, group) for group in groups), key=lambda time: time.seconds)


def exchange_time(exchange: Exchange, group: GroupLinks) -> CollectiveTime:
    """Return the time of all calls of an exchange, one after the other."""
    return collective_time(exchange.operation, exchange.elements * exchange.element_bytes, group).times(exchange.calls)


def _slowest(group: GroupLinks) -> tuple[float, float]:
    """Return bandwidth and latency of the ring's slowest link.

    A ring through nodes crosses each border once, but there is a ring for each member of a node, and they run in
    parallel over different adapters: together they have the bandwidth of all these members.
    """
    if not group.crosses:
        return group.inside.of_ring(group.size), group.inside.latency
    if max(group.members) == 1:
        return group.crossing, group.crossing_latency
    bandwidth = min(group.inside.of_ring(max(group.members)), group.crossing)
    return bandwidth, max(group.crossing_latency, group.inside.latency)


class Placement:
    """The ranks of a mesh on the nodes of a machine.

    Args:
        hardware: the machine.
        sizes: ranks along each dimension of `DIMENSIONS`; 1 by default.
        node_order: the node of each slot of consecutive ranks, numbers of all occupied nodes; by default in order.
            Nodes must have equal numbers of devices.

    Raises:
        ConfigError: more ranks than devices, or no order of the nodes. ValueError: as `MeshShape`.
    """

    def __init__(self, hardware: Hardware, sizes: Mapping[str, int], node_order: Sequence[int] | None = None) -> None:
        shape = MeshShape(sizes)
        self.hardware, self.sizes, self.num_ranks = hardware, dict(shape.sizes), shape.world_size
        nodes = hardware.nodes(self.num_ranks)
        reached = {key: node.reached for key, node in {id(node): node for node in nodes}.items()}
        self.nodes: tuple[NodeGroup, ...] = tuple(reached[id(node)] for node in nodes)
        self.node_order = tuple(range(len(self.nodes)) if node_order is None else node_order)
        self._check_order()

    def _check_order(self) -> None:
        if self.node_order == tuple(range(len(self.nodes))):
            return
        if sorted(self.node_order) != list(range(len(self.nodes))):
            raise ConfigError(f"node_order {list(self.node_order)} must have nodes 0 to {len(self.nodes) - 1} once")
        if len({node.devices_per_node for node in self.nodes}) > 1:
            raise ConfigError("node_order needs nodes with equal numbers of devices; leave it out for this hardware")

    @cached_property
    def memory_limits(self) -> tuple[float, ...]:
        """Return, by pipeline coordinate, the bytes of the smallest device of its ranks. State is equal on all
        replicas, and of equal size on all shards."""
        count = self.sizes["pipeline"]
        of_nodes = np.array([node.device.memory_bytes for node in self.nodes])
        if of_nodes.min() == of_nodes.max():
            return (float(of_nodes[0]),) * count
        at = self.partition(*(name for name in DIMENSIONS if name != "pipeline"))
        return tuple(of_nodes[self.node_of_rank[at]].min(axis=1).tolist())

    def partition(self, *names: str) -> Ints:
        """Return groups of ranks that differ only in the dimensions `names`, shape [groups, members]."""
        free = [place for place, name in enumerate(DIMENSIONS) if name in names]
        fixed = [place for place in range(len(DIMENSIONS)) if place not in free]
        ranks = np.arange(self.num_ranks).reshape(*self.sizes.values()).transpose(*fixed, *free)
        return ranks.reshape(-1, math.prod(ranks.shape[len(fixed) :]))

    @cached_property
    def node_of_rank(self) -> Ints:
        """Return the node of every rank."""
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

    @cached_method
    def groups(self, *names: str) -> list[GroupLinks]:
        """Return the links of all groups over these dimensions, equal ones once, while all groups work at the same
        time."""
        if self._even is not None:
            return [self._even_group(self._even, names)]
        return self._links_of(self.node_of_rank[self.partition(*names)])

    def slowest(self, operation: Operation, num_bytes: float, *names: str) -> CollectiveTime:
        """Return the time of a collective in all groups over these dimensions at the same time: that of the slowest
        group."""
        return _longest(operation, num_bytes, self.groups(*names))

    @cached_method
    def boundary(self, stage: int) -> list[GroupLinks]:
        """Return the links of the pairs that send from pipeline coordinate `stage` to the next, equal ones once, while
        all send.

        The last sends to the first, as in interleaved schedules. Activations go one way, gradients the other: the
        slower direction counts.
        """
        if self._even is not None:
            return [self._even_pair(self._even["pipeline"], stage)]
        pairs = self.partition("pipeline")[:, [stage, (stage + 1) % self.sizes["pipeline"]]]
        return self._links_of(self.node_of_rank[pairs])

    @cached_method
    def send(self, num_bytes: float, stage: int) -> CollectiveTime:
        """Return the time of a message over all pairs of a boundary at the same time: that of the slowest pair. Zero
        with one stage."""
        if self.sizes["pipeline"] == 1:
            return CollectiveTime(0.0, 0.0)
        return _longest("send", num_bytes, self.boundary(stage))

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

    def _links_of(self, nodes: Ints) -> list[GroupLinks]:
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
        return list(dict.fromkeys(self._group(Counter(each), busy) for each in groups))

    @cached_property
    def _kinds(self) -> Ints:
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


EXACT_NODES = 7
"""Maximum number of nodes for which all orders are tried: 5,040."""
DEFAULT_STEPS = 20_000
"""Number of orders that annealing tries."""


class OrderCost:
    """The part of a step's seconds that depends on the order of the nodes.

    Called with an order, it returns the max over pipelines of the sum of 2 message / bandwidth over the borders
    between its nodes, plus max over gradient rings of 2 (n - 1) M / (n bandwidth) with n nodes and M gradient bytes of
    a rank, each with the links' shares as in `Placement`. Links inside a node and latencies are left out, because they
    do not depend on the order.

    Args:
        hardware: with a link matrix, and as many nodes as the mesh fills.
        sizes: of the mesh.
        message_bytes: that a rank sends to the next stage for one micro-batch.
        gradient_bytes: that a rank reduces with its replicas, data and context ranks, in a step.

    Raises: ConfigError: no link matrix, or a mesh that does not divide the nodes evenly.
    """

    def __init__(
        self, hardware: Hardware, sizes: Mapping[str, int], message_bytes: float, gradient_bytes: float
    ) -> None:
        if hardware.link_matrix is None:
            raise ConfigError(f"hardware {hardware.name!r} has no link_matrix, so all node orders are equal; add one")
        placement = Placement(hardware, sizes)
        if placement.inside is None:
            raise ConfigError(
                f"mesh {MeshShape(placement.sizes)} does not divide the nodes of hardware {hardware.name!r} "
                "evenly, so nodes cannot be reordered; leave the node order out"
            )
        self.num_nodes = len(placement.nodes)
        self._matrix = hardware.link_matrix
        node, inside = placement.nodes[0], placement.inside
        self._pipelines = {tuple(itertools.pairwise(nodes)) for nodes in _crossing(placement, "pipeline")}
        sending = node.devices_per_node // inside["pipeline"]
        self._message = 2 * message_bytes * max(sending, node.outside.adapters)
        crossing = _crossing(placement, "data", "context")
        self._rings = {tuple(itertools.pairwise((*nodes, nodes[0]))) for nodes in crossing}
        local = inside["data"] * inside["context"]
        self._gradient = 2 * gradient_bytes * max(node.devices_per_node, node.outside.adapters) / local

    def __call__(self, order: Sequence[int]) -> float:
        """Return the seconds with slot i of consecutive ranks on node `order[i]`."""
        bandwidth = self._matrix
        slowest = max(
            (
                sum(1 / min(bandwidth[order[a]][order[b]], bandwidth[order[b]][order[a]]) for a, b in hops)
                for hops in self._pipelines
            ),
            default=0.0,
        )
        rings = max(
            ((1 - 1 / len(hops)) / min(bandwidth[order[a]][order[b]] for a, b in hops) for hops in self._rings),
            default=0.0,
        )
        return slowest * self._message + rings * self._gradient


def best_node_order(cost: OrderCost, seed: int = 0, steps: int = DEFAULT_STEPS) -> tuple[int, ...]:
    """Return the best order that was found, for `Placement`; it is never worse than the order by number.

    Up to `EXACT_NODES` nodes, all orders are tried; beyond that, `steps` orders by annealing. The result is a function
    of `seed`.
    """
    first = tuple(range(cost.num_nodes))
    if cost.num_nodes <= EXACT_NODES:
        return min(itertools.permutations(first), key=cost)
    numbers, order, now = random.Random(seed), first, cost(first)
    best, least = order, now
    hot, cold = 0.1 * now, 1e-4 * now
    for step in range(steps):
        temperature = hot * (cold / hot) ** (step / steps) if now else 0.0
        moved = numbers.choice(_MOVES)(order, *sorted(numbers.sample(range(len(order)), 2)))
        then = cost(moved)
        if then <= now or (temperature and numbers.random() < math.exp((now - then) / temperature)):
            order, now = moved, then
            if now < least:
                best, least = order, now
    return best


def _swap(order: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    return (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])


def _insert(order: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    return (*order[:i], order[j], *order[i:j], *order[j + 1 :])


def _reverse(order: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    return (*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :])


_MOVES: tuple[Callable[[tuple[int, ...], int, int], tuple[int, ...]], ...] = (_swap, _insert, _reverse)


def _crossing(placement: Placement, *names: str) -> set[tuple[int, ...]]:
    """Return the nodes of each group that spans nodes, in its ring's order, each once."""
    groups = map(dict.fromkeys, placement.node_of_rank[placement.partition(*names)].tolist())
    return {tuple(nodes) for nodes in groups if len(nodes) > 1}
