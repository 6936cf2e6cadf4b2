"""Machines whose groups have devices with unlike memory: each rank is judged by the device that holds it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.explorer import Explorer, order
from megapipe.planner.search.findings import NothingFits
from megapipe.planner.search.plan import Effort, search_speed, slowest_times
from megapipe.planner.search.space import Layouts, SearchSpace
from tests.planner.search.runs import machine, run, runs

SPACE = SearchSpace(max_micro_size=2, max_chunks=2, zero_stages=(0, 1, 3), recompute=("none", "full"))


def two_groups(first: float, second: float, node: int = 2, num_nodes: int = 1) -> Hardware:
    """`num_nodes` nodes with devices of `first` bytes, then any number of nodes with `second`."""
    (plain,) = machine(node=node, inside=1e10, outside=2.5e9).groups
    front = replace(plain, name="front", device=replace(plain.device, memory_bytes=first), num_nodes=num_nodes)
    return Hardware("two", (front, replace(plain, device=replace(plain.device, memory_bytes=second))))


@settings(max_examples=60, deadline=None)
@given(
    data=st.integers(1, 4),
    pipeline=st.integers(1, 6),
    context=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2]),
    node=st.integers(1, 5),
    num_nodes=st.integers(1, 4),
    numbers=st.randoms(use_true_random=False),
)
def test_a_coordinate_has_what_its_smallest_device_has(
    data: int, pipeline: int, context: int, tensor: int, node: int, num_nodes: int, numbers: object
) -> None:
    sizes = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
    hardware = two_groups(3e9, 2e9, node, num_nodes)
    nodes = list(range(len(hardware.nodes(data * pipeline * context * tensor))))
    numbers.shuffle(nodes)  # type: ignore[attr-defined]
    placement = Placement(hardware, sizes, nodes)
    least = [float("inf")] * pipeline
    for rank in range(placement.num_ranks):
        at = rank // (tensor * context) % pipeline
        least[at] = min(least[at], placement.nodes[placement.node_of(rank)].device.memory_bytes)
    assert placement.memory_limits == tuple(least)


@settings(max_examples=5, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([4, 6]),
    shares=st.tuples(st.floats(0.1, 1.1), st.floats(0.1, 1.1)),
    num_nodes=st.integers(1, 2),
)
def test_the_best_is_that_of_estimating_everything(
    base: PretrainConfig, devices: int, shares: tuple[float, float], num_nodes: int
) -> None:
    layouts = Layouts(base, devices, frozenset(), SPACE)
    sizes = sorted(estimate(each.applied(base), machine(memory=1e15)).peak_bytes for each in layouts)
    first, second = (float(sizes[min(len(sizes) - 1, int(share * len(sizes)))]) for share in shares)
    hardware = two_groups(first, second, num_nodes=num_nodes)
    everything = [estimate(each.applied(base), hardware) for each in layouts]
    fitting = sorted((each for each in everything if each.fits), key=order)
    times = slowest_times(base, hardware, devices)
    costs = Evaluation(base, hardware, times)
    fastest = Explorer(layouts, LayoutBounds(costs, devices), costs, max(first, second)).fastest(3)
    assert [order(each) for each in fastest] == [order(each) for each in fitting[:3]]


@settings(max_examples=4, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([4, 8]),
    memory=st.tuples(st.floats(5e6, 1e8), st.floats(5e6, 1e8)),
    more=st.floats(1.0, 10.0),
    group=st.integers(0, 1),
)
def test_budgets_hold_and_more_memory_never_slows_the_best(
    base: PretrainConfig, devices: int, memory: tuple[float, float], more: float, group: int
) -> None:
    def best(sizes: tuple[float, float]) -> float:
        hardware = two_groups(*sizes)
        try:
            findings = search_speed(
                base, hardware, devices, space=SPACE, effort=Effort(actions=0, alternatives=False, stages=False)
            )
        except NothingFits:
            return float("inf")
        for each in (*findings.ranked, *findings.pareto):
            answer = each.estimate
            sizes_of = {"data": answer.config.parallel.data or 1, "pipeline": answer.config.parallel.pipeline}
            sizes_of |= {"context": answer.config.parallel.context, "tensor": answer.config.parallel.tensor}
            placement, inner = Placement(hardware, sizes_of), sizes_of["context"] * sizes_of["tensor"]
            for rank in range(devices):
                needed = answer.memory[rank // inner % sizes_of["pipeline"]].total
                assert needed <= placement.nodes[placement.node_of(rank)].device.memory_bytes
        return findings.best.estimate.step_seconds

    larger = tuple(each * (more if at == group else 1.0) for at, each in enumerate(memory))
    assert best(larger) <= best(memory) * (1 + 1e-9)  # type: ignore[arg-type]


def test_pipelines_may_need_large_devices_at_the_front() -> None:
    """1F1B holds most activations on its first ranks: there is where the large devices belong."""
    base = run(num_layers=8)
    layout = replace(
        base,
        parallel=replace(base.parallel, pipeline=4, data=1),
        batch=replace(base.batch, global_size=16, micro_size=2),
        schedule=replace(base.schedule, name="1f1b"),
    )
    sizes = [each.total for each in estimate(layout, machine(1e15)).memory]
    assert max(sizes[:2]) > 1.2 * max(sizes[2:])
    large, small = float(max(sizes)), 1.1 * max(sizes[2:])
    for ask in (estimate, lambda *given: predict(*given).estimate):
        front, back = ask(layout, two_groups(large, small)), ask(layout, two_groups(small, large))
        assert front.memory == back.memory
        assert front.memory_limits == (large, large, small, small)
        assert front.fits
        assert not back.fits
        assert back.missing_bytes == pytest.approx(max(each.total for each in back.memory) - small)
        assert back.as_json()["memory_limits_bytes"] == [small, small, large, large]
