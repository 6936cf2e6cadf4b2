"""Seconds that ranks spend on talking inside a layer, by phase of a micro-batch."""

from collections.abc import Iterable

from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.collectives import CollectiveTime, GroupLinks, collective_time
from megapipe.layout.hardware.placement import Placement
from megapipe.planner.cost.layer_times import PhaseSeconds
from megapipe.spec.ops import Exchange
from megapipe.spec.parameters import LayerSpec


def exchanges_seconds(placement: Placement, exchanges: Iterable[Exchange], *names: str) -> float:
    """Of calls one behind the other, all groups over these dimensions at once."""
    return sum(
        placement.slowest(each.operation, each.elements * each.element_bytes, *names).seconds * each.calls
        for each in exchanges
        if each.calls
    )


def layer_exchange_seconds(costs: LayoutCosts, placement: Placement, layer: LayerSpec, group: str) -> PhaseSeconds:
    """What `group`, "tensor" or "context", spends on one micro-batch in a layer.

    `LayoutCosts.within_layer` tells forwards and backwards together: what another forward adds is the forward's. Of
    embedding and head, which never run twice, the embedding's is the forward's and the head's the backward's; where
    tensor ranks share tokens each has both.
    """

    def seconds(forwards: int, halves: bool) -> float:
        found = costs.within_layer(layer, forwards=forwards, halves=halves).get(group, [])
        return exchanges_seconds(placement, found, group)

    whole = seconds(1, False)
    if not whole:
        return PhaseSeconds()
    if layer.kind != "block":
        shared = costs.config.parallel.sequence
        forward = whole / 2 if shared else (whole if layer.kind == "embedding" else 0.0)
        return PhaseSeconds(forward, whole - forward)
    forward = seconds(2, False) - whole
    return PhaseSeconds(forward, whole - forward, seconds(1, True) - whole)


def shard_groups(group: GroupLinks, shards: int) -> tuple[GroupLinks, GroupLinks]:
    """Of the replicas of a weight, those that share one copy, neighbours, and those that hold the same shard."""
    local = max(group.members)
    inside = min(local, shards)
    copies, apart = group.size // shards, max(1, local // shards)
    return _part(group, shards, inside), _part(group, copies, min(copies, apart))


def group_seconds(exchanges: Iterable[Exchange], group: GroupLinks) -> float:
    """Of calls one behind the other in one group."""
    times: list[CollectiveTime] = [
        collective_time(each.operation, each.elements * each.element_bytes, group).times(each.calls)
        for each in exchanges
    ]
    return sum(time.seconds for time in times)


def _part(group: GroupLinks, size: int, local: int) -> GroupLinks:
    nodes = size // local
    if nodes <= 1:
        return GroupLinks((size,), group.inside)
    crossing = group.crossing * local / max(group.members)
    return GroupLinks((local,) * nodes, group.inside, crossing, group.crossing_latency)
