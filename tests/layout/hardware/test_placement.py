"""Which groups cross nodes: rank by rank, by hand, and by closed forms; and orders of nodes by measured links, against
every order and against the placement's own links."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.parallel import DIMENSIONS
from megapipe.layout.hardware.description import (
    Device,
    Efficiency,
    Hardware,
    IntraNodeLink,
    Network,
    NodeGroup,
    load_hardware,
)
from megapipe.layout.hardware.placement import EXACT_NODES, GroupLinks, OrderCost, Placement, best_node_order

FITTED = load_hardware("a100-80")
_DEVICE = replace(FITTED.groups[0].device, efficiency=Efficiency())
SELENE = replace(FITTED, groups=(replace(FITTED.groups[0], device=_DEVICE),))
"""With its nominal bandwidths."""
DEVICE = Device("a", {"bf16": 1e12}, 1e9, 1e9)


def machine(devices: int, adapters: int = 1, matrix: tuple[tuple[float, ...], ...] | None = None) -> Hardware:
    inside, outside = IntraNodeLink(1.0, 100.0, 50.0), Network(10.0, 24.0, adapters)
    return Hardware("m", (NodeGroup("n", DEVICE, devices, inside, outside),), matrix)


def test_selene_as_the_megatron_paper_lays_out_a_trillion() -> None:
    """8 tensor ranks fill a node, so 64 stages and 6 replicas meet over InfiniBand (arXiv 2104.04473, table 1)."""
    placement = Placement(SELENE, {"tensor": 8, "pipeline": 64, "data": 6})
    assert placement.num_ranks == 3072
    assert [placement.crosses(name) for name in ("tensor", "pipeline", "data")] == [False, True, True]
    (replicas,) = placement.groups("data")
    assert (replicas.members, replicas.crossing) == ((1,) * 6, 25e9)  # an adapter to each device
    assert placement.send(25e6, 3).transfer == pytest.approx(1e-3)
    assert placement.slowest("all_reduce", 3e9, "data").transfer == pytest.approx(2 * 5 / 6 * 3e9 / 25e9)
    assert placement.slowest("all_gather", 3e8, "tensor").transfer == pytest.approx(7 / 8 * 3e8 / 300e9)


def test_nominal_bandwidths_are_scaled_and_measured_ones_are_not() -> None:
    sizes = {"tensor": 8, "pipeline": 4, "data": 2}
    nominal, reached = Placement(SELENE, sizes), Placement(FITTED, sizes)
    share = FITTED.groups[0].device.efficiency.links
    assert share < 1
    for names in (("tensor",), ("data",), ("data", "pipeline")):
        slow, fast = (each.slowest("all_reduce", 3e9, *names) for each in (reached, nominal))
        assert slow.transfer == pytest.approx(fast.transfer / share)
        assert slow.latency == fast.latency
    assert reached.send(25e6, 1).transfer == pytest.approx(nominal.send(25e6, 1).transfer / share)
    assert reached.inside == nominal.inside
    device = replace(DEVICE, efficiency=Efficiency(links=0.5))
    measured = machine(2, matrix=((0.0, 3.0), (3.0, 0.0)))
    (group,) = measured.groups
    slower = replace(measured, groups=(replace(group, device=device),))
    pair = {"pipeline": 2, "tensor": 2}
    assert Placement(slower, pair).boundary(0)[0].crossing == Placement(measured, pair).boundary(0)[0].crossing


def test_one_adapter_is_shared_by_all_that_send() -> None:
    """2 tensor, 2 stages, 4 replicas on nodes of 4: a node's 24 B/s go to 4 rings of replicas, 6 B/s each. No message
    between stages leaves its node."""
    placement = Placement(machine(4), {"tensor": 2, "pipeline": 2, "data": 4})
    assert placement.inside == {"tensor": 2, "context": 1, "pipeline": 2, "data": 1}
    (replicas,) = placement.groups("data")
    assert (replicas.members, replicas.crossing, replicas.crossing_latency) == ((1,) * 4, 6.0, 10.0)
    assert placement.boundary(0) == [GroupLinks((2,), IntraNodeLink(1.0, 100.0, 50.0))]
    assert placement.send(50.0, 0).seconds == 1.0 + 50 / 50
    assert Placement(machine(4), {"tensor": 4}).send(1.0, 0).seconds == 0


def test_only_the_stages_at_a_nodes_border_send_out() -> None:
    """4 stages, 2 on each node of 4, 2 tensor ranks: two devices of a node send at the border, 12 B/s each."""
    placement = Placement(machine(4), {"tensor": 2, "pipeline": 4})
    assert [pair.crosses for stage in range(4) for pair in placement.boundary(stage)] == [False, True, False, True]
    assert placement.boundary(1)[0].crossing == 12.0


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 4, 6]) for name in DIMENSIONS}),
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    adapters=st.sampled_from([1, 2, 8]),
    names=st.sets(st.sampled_from(DIMENSIONS), min_size=1),
)
def test_the_closed_form_is_what_counting_ranks_gives(
    sizes: dict[str, int], devices: int, adapters: int, names: set[str]
) -> None:
    hardware = machine(devices, adapters)
    placement = Placement(hardware, sizes)
    num_nodes = math.ceil(placement.num_ranks / devices)
    same_rates = tuple((24.0,) * num_nodes for _ in range(num_nodes))
    counted = Placement(replace(hardware, link_matrix=same_rates), sizes)  # a matrix of equal rates is counted
    assert placement.groups(*names) == counted.groups(*names)
    for stage in range(sizes["pipeline"] if sizes["pipeline"] > 1 else 0):
        assert placement.boundary(stage) == counted.boundary(stage)
    per_node = {
        tuple(sorted(Counter(rank // devices for rank in ranks).values())) for ranks in placement.partition(*names)
    }
    assert {tuple(sorted(group.members)) for group in placement.groups(*names)} == per_node


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.fixed_dictionaries({name: st.integers(1, 4) for name in DIMENSIONS}),
    names=st.sets(st.sampled_from(DIMENSIONS)),
)
def test_partitions_hold_ranks_once_and_vary_named_dimensions(sizes: dict[str, int], names: set[str]) -> None:
    placement = Placement(machine(8), sizes)
    lists = placement.partition(*names)
    assert sorted(rank for ranks in lists for rank in ranks) == list(range(placement.num_ranks))
    for ranks in lists:
        assert len(ranks) == math.prod(sizes[name] for name in names)
        for rank in ranks:
            for name in set(DIMENSIONS) - names:
                stride = math.prod(sizes[each] for each in DIMENSIONS[DIMENSIONS.index(name) + 1 :])
                assert rank // stride % sizes[name] == ranks[0] // stride % sizes[name]


def test_measured_links_count_along_the_ring_in_its_order() -> None:
    hardware = machine(1, matrix=((0.0, 9.0, 1.0), (9.0, 0.0, 9.0), (9.0, 9.0, 0.0)))
    assert Placement(hardware, {"data": 3}).groups("data")[0].crossing == 9.0  # 0 -> 1 -> 2 -> 0
    assert Placement(hardware, {"data": 3}, (0, 2, 1)).groups("data")[0].crossing == 1.0  # 0 -> 2
    chain = Placement(hardware, {"pipeline": 3}, (0, 2, 1))
    assert [chain.boundary(stage)[0].crossing for stage in range(3)] == [1.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("sizes", "order", "message"),
    [
        ({"tensr": 2}, None, "unknown mesh dimension 'tensr': the dimensions are data, pipeline"),
        ({"tensor": 0}, None, "dimension tensor has size 0; it must be at least 1"),
        ({"data": 3}, (0, 0, 1), r"node_order \[0, 0, 1\] must have nodes 0 to 2 once"),
    ],
)
def test_wrong_placements_are_refused(sizes: dict[str, int], order: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(machine(1), sizes, order)


def counted_links(placement: Placement, hosts: list[int], lists: list[list[int]]) -> set[GroupLinks]:
    """Links of groups that work at the same time: each group's members node by node, and its slowest border by the
    shares of what is active on both sides. hosts: the node of each rank."""
    groups = [Counter(hosts[rank] for rank in ranks) for ranks in lists]
    active: Counter[int] = sum((each for each in groups if len(each) > 1), Counter())
    matrix, links = placement.hardware.link_matrix, set()
    for each in groups:
        order, nodes = list(each), [placement.nodes[node] for node in each]
        inside = IntraNodeLink(
            max(node.inside.latency for node in nodes),
            min(node.inside.bandwidth for node in nodes),
            min(node.inside.pair_bandwidth for node in nodes),
        )
        crossing = latency = 0.0
        if len(order) > 1:
            latency = max(node.outside.latency for node in nodes)
            crossing = min(
                each[node] * placement.nodes[node].outside.of_device(active[node], matrix[a][b] if matrix else None)
                for a, b in zip(order, [*order[1:], order[0]], strict=True)
                for node in (a, b)
            )
        links.add(GroupLinks(tuple(each.values()), inside, crossing, latency))
    return links


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    sizes=st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 4]) for name in ("data", "pipeline", "tensor")}),
    names=st.lists(st.sampled_from(["data", "pipeline", "tensor"]), min_size=1, max_size=3, unique=True),
    per_node=st.lists(st.integers(1, 5), min_size=1, max_size=3) | st.just([4, 4]),
    matrix=st.booleans(),
)
def test_groups_on_any_nodes_match_counting_by_rank(
    data: st.DataObject, sizes: dict[str, int], names: list[str], per_node: list[int], matrix: bool
) -> None:
    """Nodes of several kinds and sizes, cut where ranks happen to end; nodes of one size in any order."""
    inside = [IntraNodeLink(1.0 + at, 50.0 + 10 * at, 50.0 - at) for at in range(len(per_node))]
    kinds = [
        NodeGroup(f"n{at}", DEVICE, size, inside[at], Network(10.0 + at, 12.0, 2), 2)
        for at, size in enumerate(per_node)
    ]
    kinds.append(NodeGroup("rest", DEVICE, 4, IntraNodeLink(1.0, 100.0, 50.0), Network(10.0, 24.0, 1), num_nodes=64))
    devices = [kind.devices_per_node for kind in kinds for _ in range(kind.num_nodes or 0)]
    count, ranks = len(devices), math.prod(sizes.values())
    links = tuple(tuple(1.0 + (3 * a + 5 * b) % 7 for b in range(count)) for a in range(count)) if matrix else None
    order = list(range(next(used for used in range(count) if sum(devices[:used]) >= ranks)))
    if set(per_node) == {4}:
        order = data.draw(st.permutations(order))
    hosts = [node for node in order for _ in range(devices[node])]
    placement = Placement(Hardware("mixed", tuple(kinds), links), sizes, order)
    assert placement.node_of_rank.tolist() == hosts[:ranks]
    assert set(placement.groups(*names)) == counted_links(placement, hosts, placement.partition(*names))
    stages = sizes["pipeline"]
    for stage in range(stages if stages > 1 else 0):
        pairs = [[each[stage], each[(stage + 1) % stages]] for each in placement.partition("pipeline")]
        assert set(placement.boundary(stage)) == counted_links(placement, hosts, pairs)


def uneven(num_nodes: int, seed: int) -> tuple[tuple[float, ...], ...]:
    numbers = random.Random(seed)
    return tuple(tuple(numbers.uniform(5.0, 20.0) for _ in range(num_nodes)) for _ in range(num_nodes))


def placed_seconds(hardware: Hardware, sizes: dict[str, int], order: tuple[int, ...]) -> float:
    """The cost from links rank by rank: message 3 each way over every border, 700 bytes of gradients between nodes."""
    placement = Placement(hardware, sizes, order)
    assert hardware.link_matrix is not None
    pipelines = []
    for ranks in placement.partition("pipeline"):
        pairs = itertools.pairwise(placement.node_of_rank[ranks].tolist())
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
    num_nodes = Placement(machine(4), sizes).num_ranks // 4
    hardware = machine(4, 2, uneven(num_nodes, 1))
    cost = OrderCost(hardware, sizes, message_bytes=3, gradient_bytes=700)
    for order in itertools.islice(itertools.permutations(range(num_nodes)), 0, None, 7):
        assert cost(order) == pytest.approx(placed_seconds(hardware, sizes, order))


def test_few_nodes_are_ordered_best_of_all() -> None:
    cost = OrderCost(machine(4, 2, uneven(5, 2)), {"pipeline": 10, "tensor": 2}, 3, 700)
    best = best_node_order(cost)
    assert cost(best) == min(cost(order) for order in itertools.permutations(range(5)))
    assert cost(best) < cost(range(5))


def test_annealing_finds_a_hidden_chain() -> None:
    """10 nodes of slow links but for a chain through all of them in a secret order."""
    secret = random.Random(5).sample(range(10), 10)
    fast = {frozenset(pair) for pair in itertools.pairwise(secret)}
    rates = tuple(tuple(20.0 if frozenset((a, b)) in fast else 5.0 for b in range(10)) for a in range(10))
    assert len(secret) > EXACT_NODES
    cost = OrderCost(machine(4, 2, rates), {"pipeline": 10, "tensor": 4}, 3, 0)
    best = best_node_order(cost, seed=1, steps=6000)
    assert cost(best) == pytest.approx(9 * 2 * 3 * 4 / 20.0)
    assert list(best) in (secret, secret[::-1])
    assert best_node_order(cost, seed=1, steps=6000) == best


@pytest.mark.parametrize("seed", range(3))
def test_annealing_is_never_dearer_than_the_order_by_number(seed: int) -> None:
    cost = OrderCost(machine(4, 2, uneven(8, seed)), {"data": 2, "pipeline": 8, "tensor": 2}, 3, 700)
    for steps in (0, 1, 300):
        best = best_node_order(cost, seed, steps)
        assert sorted(best) == list(range(8))
        assert cost(best) <= cost(range(8))


def test_without_a_choice_it_is_said() -> None:
    with pytest.raises(ConfigError, match="has no link_matrix, so all node orders are equal"):
        OrderCost(machine(4), {"data": 8}, 1, 1)
    with pytest.raises(ConfigError, match=r"mesh data 4 x .* tensor 3 does not divide the nodes"):
        OrderCost(machine(4, 2, uneven(3, 0)), {"data": 4, "tensor": 3}, 1, 1)
    alone = OrderCost(machine(4, 2, uneven(1, 0)), {"tensor": 4}, 1, 1)
    assert (best_node_order(alone), alone((0,))) == ((0,), 0.0)
