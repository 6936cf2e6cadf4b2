"""Orders of nodes by measured links: against every order, and against the placement's own links."""

import itertools
import random

import pytest

from megapipe.config import ConfigError
from megapipe.layout.hardware.description import Device, Hardware, IntraNodeLink, Network, NodeGroup
from megapipe.layout.hardware.placement import EXACT_NODES, OrderCost, Placement, best_node_order


def machine(matrix: tuple[tuple[float, ...], ...] | None, devices: int = 4, adapters: int = 2) -> Hardware:
    nodes = None if matrix is None else len(matrix)
    device = Device("a", {"bf16": 1e12}, 1e9, 1e9)
    group = NodeGroup("n", device, devices, IntraNodeLink(0.0, 1e9, 1e9), Network(0.0, 20.0, adapters), nodes)
    return Hardware("m", (group,), matrix)


def uneven(num_nodes: int, seed: int) -> tuple[tuple[float, ...], ...]:
    numbers = random.Random(seed)
    return tuple(tuple(numbers.uniform(5.0, 20.0) for _ in range(num_nodes)) for _ in range(num_nodes))


def placed_seconds(hardware: Hardware, sizes: dict[str, int], order: tuple[int, ...]) -> float:
    """The cost from links rank by rank: message 3 each way over every border, 700 bytes of gradients between nodes."""
    placement = Placement(hardware, sizes, order)
    assert hardware.link_matrix is not None
    pipelines = []
    for ranks in placement.partition("pipeline"):
        pairs = [(placement.node_of(a), placement.node_of(b)) for a, b in itertools.pairwise(ranks)]
        rates = [min(hardware.link_matrix[a][b], hardware.link_matrix[b][a]) for a, b in pairs if a != b]
        pipelines.append(sum(2 * 3 / (rate / 2) for rate in rates))  # 2 of a node's 4 devices send at its border
    rings = [
        2 * (len(group.members) - 1) * 700 / (len(group.members) * group.crossing)
        for group in placement.groups("data", "context")
        if group.crosses
    ]
    return max(pipelines) + max(rings, default=0.0)


@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 4, "tensor": 2}, {"pipeline": 4, "data": 3, "context": 2}])
def test_the_cost_is_what_the_placements_links_give(sizes: dict[str, int]) -> None:
    num_nodes = Placement(machine(None), sizes).num_ranks // 4
    hardware = machine(uneven(num_nodes, 1))
    cost = OrderCost(hardware, sizes, message_bytes=3, gradient_bytes=700)
    for order in itertools.islice(itertools.permutations(range(num_nodes)), 0, None, 7):
        assert cost(order) == pytest.approx(placed_seconds(hardware, sizes, order))


def test_few_nodes_are_ordered_best_of_all() -> None:
    cost = OrderCost(machine(uneven(5, 2)), {"pipeline": 10, "tensor": 2}, 3, 700)
    best = best_node_order(cost)
    assert cost(best) == min(cost(order) for order in itertools.permutations(range(5)))
    assert cost(best) < cost(range(5))


def test_annealing_finds_a_hidden_chain() -> None:
    """10 nodes of slow links but for a chain through all of them in a secret order."""
    secret = random.Random(5).sample(range(10), 10)
    fast = {frozenset(pair) for pair in itertools.pairwise(secret)}
    rates = tuple(tuple(20.0 if frozenset((a, b)) in fast else 5.0 for b in range(10)) for a in range(10))
    assert len(secret) > EXACT_NODES
    cost = OrderCost(machine(rates), {"pipeline": 10, "tensor": 4}, 3, 0)
    best = best_node_order(cost, seed=1, steps=6000)
    assert cost(best) == pytest.approx(9 * 2 * 3 * 4 / 20.0)
    assert list(best) in (secret, secret[::-1])
    assert best_node_order(cost, seed=1, steps=6000) == best


@pytest.mark.parametrize("seed", range(3))
def test_annealing_is_never_dearer_than_the_order_by_number(seed: int) -> None:
    cost = OrderCost(machine(uneven(8, seed)), {"data": 2, "pipeline": 8, "tensor": 2}, 3, 700)
    for steps in (0, 1, 300):
        best = best_node_order(cost, seed, steps)
        assert sorted(best) == list(range(8))
        assert cost(best) <= cost(range(8))


def test_without_a_choice_it_is_said() -> None:
    with pytest.raises(ConfigError, match="has no link_matrix, without which all node orders are equal"):
        OrderCost(machine(None), {"data": 8}, 1, 1)
    with pytest.raises(ConfigError, match=r"mesh data 4 x .* tensor 3 does not divide the nodes"):
        OrderCost(machine(uneven(3, 0)), {"data": 4, "tensor": 3}, 1, 1)
    alone = OrderCost(machine(uneven(1, 0)), {"tensor": 4}, 1, 1)
    assert (best_node_order(alone), alone((0,))) == ((0,), 0.0)
