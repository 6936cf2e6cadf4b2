"""Times of collectives over links: a single ring, or rings inside nodes that are joined by rings between nodes.

n members, M bytes of the whole buffer as `spec.ops.Exchange` counts them, one latency per step. A ring forwards
M / n bytes per step, over every link at once, so its slowest link sets the pace; an all-gather or reduce-scatter takes
n - 1 steps (Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521, section 4.1), an all-reduce both.
Between nodes, the members with the same local index form a ring, and all rings share the node's adapters: an
all-reduce takes 2 (n_in - 1) M / (n_in bw_in) + 2 (n_out - 1) M / (n_out bw_out), Pipette's form (arXiv 2405.18093)
with bw_out the bandwidth of all members of a node together. A library uses the faster algorithm, and so does
`collective_time`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megapipe.layout.hardware.description import IntraNodeLink
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

    algorithm: str
    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Sum of both."""
        return self.latency + self.transfer

    def times(self, calls: int) -> "CollectiveTime":
        """Return the time of this number of calls, one after the other."""
        return CollectiveTime(self.algorithm, self.latency * calls, self.transfer * calls)


def ring_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of an all-reduce, reduce-scatter or all-gather in one ring through all members."""
    passes = 2 if operation == "all_reduce" else 1
    steps = passes * (group.size - 1)
    bandwidth, latency = _slowest(group)
    return CollectiveTime("ring", steps * latency, steps * num_bytes / group.size / bandwidth)


def hierarchical_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time with rings inside the nodes and rings between them; every node needs the same number of members.

    Raises:
        ValueError: members are spread unevenly.
    """
    if len(set(group.members)) > 1:
        raise ValueError(
            f"members by node {group.members}: rings between nodes need the same number of members on each node; use "
            "a single ring"
        )
    passes = 2 if operation == "all_reduce" else 1
    inside, outside = group.members[0], len(group.members)
    steps_in, steps_out = passes * (inside - 1), passes * (outside - 1)
    transfer = steps_in * num_bytes / inside / group.inside.of_ring(inside)
    if outside > 1:
        transfer += steps_out * num_bytes / outside / group.crossing
    latency = steps_in * group.inside.latency + steps_out * group.crossing_latency
    return CollectiveTime("hierarchical", latency, transfer)


def all_to_all_time(num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time in which every member sends M / n bytes to every other; links inside and between nodes work in
    parallel."""
    share, most = num_bytes / group.size, max(group.members)
    transfers = [(most - 1) * share / (group.inside.pair_bandwidth if most == 2 else group.inside.bandwidth)]
    if group.crosses:
        transfers.append(max(local * (group.size - local) for local in group.members) * share / group.crossing)
    latency = _slowest(group)[1]
    return CollectiveTime("pairwise", (group.size - 1) * latency, max(transfers))


def send_time(num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of a message from one rank to another: `group` is the pair."""
    bandwidth = group.crossing if group.crosses else group.inside.pair_bandwidth
    latency = group.crossing_latency if group.crosses else group.inside.latency
    return CollectiveTime("send", latency, num_bytes / bandwidth)


@lru_cache(maxsize=4096)
def collective_time(operation: Operation, num_bytes: float, group: GroupLinks) -> CollectiveTime:
    """Return the time of one call with the faster algorithm, or the measured time of such calls inside a node; zero
    for a group of one."""
    if group.size == 1:
        return CollectiveTime("none", 0.0, 0.0)
    measured = None if group.crosses else group.inside.measured(operation, group.size)
    if measured is not None:
        return CollectiveTime(f"measured over {measured.over}", measured.latency, num_bytes / measured.bandwidth)
    if operation == "send":
        return send_time(num_bytes, group)
    if operation == "all_to_all":
        return all_to_all_time(num_bytes, group)
    return min(_ways(operation, num_bytes, group), key=lambda way: way.seconds)


def exchange_time(exchange: Exchange, group: GroupLinks) -> CollectiveTime:
    """Return the time of all calls of an exchange, one after the other."""
    return collective_time(exchange.operation, exchange.elements * exchange.element_bytes, group).times(exchange.calls)


def _ways(operation: Operation, num_bytes: float, group: GroupLinks) -> Iterator[CollectiveTime]:
    yield ring_time(operation, num_bytes, group)
    if group.crosses and group.members[0] > 1 and len(set(group.members)) == 1:
        yield hierarchical_time(operation, num_bytes, group)


def _slowest(group: GroupLinks) -> tuple[float, float]:
    """Return bandwidth and latency of the ring's slowest link.

    A ring through nodes crosses each border once, but there is a ring for each member of a node, and they run in
    parallel over different adapters: together they have the bandwidth of all these members.
    """
    if not group.crosses:
        return group.inside.of_ring(group.size), group.inside.latency
    if max(group.members) == 1:
        return group.crossing, group.crossing_latency
    return min(group.inside.of_ring(max(group.members)), group.crossing), max(
        group.crossing_latency, group.inside.latency
    )
