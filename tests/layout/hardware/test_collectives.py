"""Times of collectives against closed forms, and against rings stepped link by link."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layout.hardware.description import IntraNodeLink
from megapipe.layout.hardware.placement import (
    GroupLinks,
    collective_time,
    exchange_time,
    hierarchical_time,
    ring_time,
    send_time,
)
from megapipe.spec.ops import Exchange, Operation

FAST = IntraNodeLink(latency=1e-6, bandwidth=300e9, pair_bandwidth=300e9)
RINGS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def stepped_ring(num_members: int, chunk: Fraction, links: list[tuple[Fraction, Fraction]]) -> Fraction:
    """Seconds until every member holds every chunk: member i passes on to i + 1, over (latency, bandwidth) of link i,
    what it received last; all start a step together."""
    holds = [{member} for member in range(num_members)]
    newest = list(range(num_members))
    now = Fraction(0)
    while any(len(chunks) < num_members for chunks in holds):
        now += max(latency + chunk / bandwidth for latency, bandwidth in links)
        newest = [newest[member - 1] for member in range(num_members)]
        for member, block in enumerate(newest):
            assert block not in holds[member], "a ring brings each chunk once"
            holds[member].add(block)
    return now


@settings(max_examples=25, deadline=None)
@given(
    local=st.integers(1, 4),
    nodes=st.integers(1, 4),
    shares=st.tuples(*[st.integers(1, 100)] * 2),
    latencies=st.tuples(*[st.integers(0, 50)] * 2),
    num_bytes=st.integers(1, 10**6),
)
def test_rings_take_what_stepping_them_takes(
    local: int, nodes: int, shares: tuple[int, int], latencies: tuple[int, int], num_bytes: int
) -> None:
    """`local` rings run side by side, one starting from each local member of a node, on equal parts of the buffer."""
    size, (fast, slow) = local * nodes, shares
    group = GroupLinks((local,) * nodes, IntraNodeLink(latencies[0], fast, fast), slow, latencies[1])
    inside, border = (Fraction(latencies[0]), Fraction(fast)), (Fraction(latencies[1]), Fraction(slow))
    links = [border if nodes > 1 and (i + 1) % local == 0 else inside for i in range(size)]
    whole = stepped_ring(size, Fraction(num_bytes, size), links)
    slowest = max(latency for latency, _ in links), min(bandwidth for _, bandwidth in links)
    assert ring_time("all_gather", num_bytes, group).seconds == pytest.approx(
        float((size - 1) * (slowest[0] + Fraction(num_bytes, size) / slowest[1]))
    )
    if slowest in links:  # one link is slowest in both
        assert ring_time("all_gather", num_bytes, group).seconds == pytest.approx(float(whole))
        assert ring_time("all_reduce", num_bytes, group).seconds == pytest.approx(float(2 * whole))
    within = stepped_ring(local, Fraction(num_bytes, local), [inside] * local)
    between = stepped_ring(nodes, Fraction(num_bytes, local * nodes), [(border[0], border[1] / local)] * nodes)
    both = float(within + between)
    assert hierarchical_time("reduce_scatter", num_bytes, group).seconds == pytest.approx(both)
    assert hierarchical_time("all_reduce", num_bytes, group).seconds == pytest.approx(2 * both)


def test_the_hierarchical_all_reduce_is_pipettes_form() -> None:
    """2 (n_in - 1) M / (n_in bw_in) + 2 (n_out - 1) M / (n_out bw_out), with 8 adapters of 25 GB/s."""
    time = hierarchical_time("all_reduce", 1e9, GroupLinks((8,) * 16, FAST, 200e9, 5e-6))
    assert time.transfer == pytest.approx(2 * 7 * 1e9 / (8 * 300e9) + 2 * 15 * 1e9 / (16 * 200e9))
    assert time.latency == pytest.approx(2 * 7 * 1e-6 + 2 * 15 * 5e-6)


@pytest.mark.parametrize("operation", RINGS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_sends_what_the_costs_count(operation: Operation, size: int) -> None:
    exchange = Exchange(operation, 1000, 2, calls=3)
    time = exchange_time(exchange, GroupLinks((size,), IntraNodeLink(0.0, 7e9, 7e9)))
    assert time.transfer == pytest.approx(exchange.sent(size) / 7e9)
    assert time.latency == 0


def test_all_to_all_uses_inner_and_outer_links_concurrently() -> None:
    exchange = Exchange("all_to_all", 800, 1)
    alone = exchange_time(exchange, GroupLinks((8,), IntraNodeLink(0.0, 7.0, 7.0)))
    assert alone.seconds == pytest.approx(exchange.sent(8) / 7)
    for crossing, seconds in ((8.0, 200 / 1.0), (1.6, 2 * 2 * 200 / 1.6)):
        group = GroupLinks(
            (2, 2), IntraNodeLink(1.0, 5.0, 1.0), crossing, 10.0
        )  # each member gives each other 200 bytes
        time = exchange_time(exchange, group)
        assert (time.transfer, time.latency) == (seconds, 3 * 10)


def test_the_faster_way_is_taken() -> None:
    """Long messages over slow borders: fewer bytes cross in rings by nodes. Short ones: fewer slow steps."""
    group = GroupLinks((8, 8), FAST, 3e9, 1e-5)
    for num_bytes in (8.0, 1e9):
        ways = [ring_time("all_reduce", num_bytes, group), hierarchical_time("all_reduce", num_bytes, group)]
        assert collective_time("all_reduce", num_bytes, group) == min(ways, key=lambda way: way.seconds)
    assert collective_time("all_reduce", 1e9, group) == hierarchical_time("all_reduce", 1e9, group)
    even = GroupLinks((8, 8), IntraNodeLink(1e-6, 200e9, 200e9), 400e9, 1e-6)
    assert collective_time("all_reduce", 1e9, even) == ring_time("all_reduce", 1e9, even)


def test_two_without_a_switch_have_their_pairs_link_alone() -> None:
    mesh = IntraNodeLink(latency=0.0, bandwidth=150e9, pair_bandwidth=25e9)
    assert ring_time("all_gather", 1e9, GroupLinks((2,), mesh)).seconds == pytest.approx(0.5e9 / 25e9)
    assert ring_time("all_gather", 1e9, GroupLinks((4,), mesh)).seconds == pytest.approx(0.75e9 / 150e9)
    assert send_time(1e9, GroupLinks((2,), mesh)).seconds == pytest.approx(1e9 / 25e9)
    assert send_time(1e9, GroupLinks((1, 1), mesh, 3e9, 2.0)).seconds == pytest.approx(2 + 1e9 / 3e9)


def test_single_ranks_take_no_time_uneven_nodes_one_ring() -> None:
    alone = GroupLinks((1,), FAST)
    for operation in (*RINGS, "all_to_all", "send"):
        assert collective_time(operation, 1e9, alone).seconds == 0
    uneven = GroupLinks((4, 2), FAST, 25e9, 1e-5)
    assert collective_time("all_reduce", 1e9, uneven) == ring_time("all_reduce", 1e9, uneven)


@settings(max_examples=30, deadline=None)
@given(
    members=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    bandwidths=st.tuples(*[st.floats(1e9, 1e12)] * 2),
    faster=st.floats(1, 10),
    operation=st.sampled_from([*RINGS, "all_to_all"]),
    num_bytes=st.floats(1, 1e10),
)
def test_faster_links_are_never_slower(
    members: list[int], bandwidths: tuple[float, float], faster: float, operation: Operation, num_bytes: float
) -> None:
    def seconds(inside: float, crossing: float, size: float = num_bytes) -> float:
        link = IntraNodeLink(1e-6, inside, inside)
        return collective_time(operation, size, GroupLinks(tuple(members), link, crossing, 1e-5)).seconds

    inside, crossing = bandwidths
    now = seconds(inside, crossing)
    assert 0 <= seconds(inside * faster, crossing) <= now * (1 + 1e-9)
    assert seconds(inside, crossing * faster) <= now * (1 + 1e-9)
    assert seconds(inside, crossing, num_bytes * faster) >= now * (1 - 1e-9)
