"""The order in which ranks fill the nodes, if each link between nodes has been measured.

Pipette's search over orders of servers (arXiv 2405.18093): the cost is the slowest pipeline's messages plus the
slowest ring of gradients; small machines are searched in full, larger ones by simulated annealing with its moves.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement

EXACT_NODES = 7
"""Maximum number of nodes for which all orders are tried: 5,040."""
DEFAULT_STEPS = 20_000
"""Number of orders that annealing tries."""

_Hop = tuple[int, int]


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
            raise ConfigError(
                f"hardware {hardware.name!r} has no link_matrix, without which all node orders are equal; add one"
            )
        placement = Placement(hardware, sizes)
        if placement.inside is None:
            shape = " x ".join(f"{name} {size}" for name, size in placement.sizes.items())
            raise ConfigError(
                f"mesh {shape} does not divide the nodes of hardware {hardware.name!r} evenly, so nodes cannot be "
                "reordered; leave the node order out"
            )
        self.num_nodes = len(placement.nodes)
        self._matrix = hardware.link_matrix
        node, inside = placement.nodes[0], placement.inside
        self._pipelines = {
            hops for hops in (_hops(placement, ranks) for ranks in placement.partition("pipeline")) if hops
        }
        sending = node.devices_per_node // inside["pipeline"]
        self._message = 2 * message_bytes * max(sending, node.outside.adapters)
        rings = placement.partition("data", "context")
        self._rings = {nodes for nodes in (_nodes(placement, ranks) for ranks in rings) if len(nodes) > 1}
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
            (
                (1 - 1 / len(nodes)) / min(bandwidth[order[a]][order[b]] for a, b in _cycle(nodes))
                for nodes in self._rings
            ),
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
    return _annealed(cost, first, random.Random(seed), steps)


def _annealed(cost: OrderCost, first: tuple[int, ...], numbers: random.Random, steps: int) -> tuple[int, ...]:
    order, now = first, cost(first)
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


def _nodes(placement: Placement, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a group in its ring's order, each once."""
    return tuple(dict.fromkeys(placement.node_of(rank) for rank in ranks))


def _hops(placement: Placement, ranks: Sequence[int]) -> tuple[_Hop, ...]:
    """Return the borders between nodes along a pipeline."""
    return tuple(itertools.pairwise(_nodes(placement, ranks)))


def _cycle(nodes: tuple[int, ...]) -> list[_Hop]:
    return list(itertools.pairwise((*nodes, nodes[0])))
