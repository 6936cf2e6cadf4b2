"""Branch and bound compared with exhaustive estimates: with an artificial cost and bounds, and with the cost model.

On machines whose groups have devices with unlike memory, each rank is judged by the device that holds it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.planner.cost.estimate import Estimate, RankMemory, Term
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.explorer import Explorer, LayoutFilter, order, pareto
from megapipe.planner.search.plan import slowest_times
from megapipe.planner.search.space import Branch, Choice, Layout, Layouts, SearchSpace, Shape
from tests.planner.search.runs import machine, run, runs

LIMIT = 600.0


class MadeUp:
    """Random costs, few of them alike, and random bounds below them, of layouts and of whole branches."""

    def __init__(self, layouts: Layouts, seed: int) -> None:
        rng = random.Random(seed)
        self._base = layouts.base
        self.costs = {each: (rng.randint(1, 40) / 4, rng.randint(10, 1000)) for each in layouts}
        self.below = {each: (rng.uniform(0.3, 1.0), rng.uniform(0.3, 1.0)) for each in self.costs}
        self.near = {each: rng.uniform(0.9, 1.0) for each in self.costs}
        self._share = rng.uniform(0.6, 1.0)

    def of(self, shape: Shape, choices: Sequence[Choice]) -> tuple[np.ndarray, np.ndarray]:
        layouts = [Layout(shape, *choice) for choice in choices]
        seconds = np.array([self.costs[each][0] * self.below[each][0] for each in layouts])
        return seconds, np.array([self.costs[each][1] * self.below[each][1] for each in layouts])

    def of_mesh(self, mesh: Branch, micro_sizes: Sequence[int], choices: Sequence[Choice]) -> tuple[float, float]:
        return self._least([each for each in self.costs if each.shape[:4] == mesh[:4]])

    def of_branch(self, branch: Branch, shapes: Sequence[Shape], choices: Sequence[Choice]) -> tuple[float, float]:
        return self._least([each for each in self.costs if each.shape in shapes])

    def _least(self, layouts: list[Layout]) -> tuple[float, float]:
        seconds, num_bytes = (min(self.costs[each][at] for each in layouts) for at in (0, 1))
        return seconds * self._share, num_bytes * self._share

    def closer(self, layout: Layout) -> float:
        return self.costs[layout][0] * self.near[layout]

    def least_seconds(self, layout: Layout) -> float:
        return self.costs[layout][0] * (1.0 + self.near[layout]) / 2.0

    def least_bytes(self, layout: Layout) -> float:
        return self.costs[layout][1] * self.near[layout]

    def num_bytes(self, layout: Layout) -> int:
        return self.costs[layout][1]

    def fits(self, layout: Layout) -> bool:
        return self.costs[layout][1] <= LIMIT

    def estimate(self, layout: Layout) -> Estimate:
        seconds, num_bytes = self.costs[layout]
        memory = (RankMemory(num_bytes, 0, 0, 0, 0, 0),)
        config = layout.applied(self._base)
        return Estimate(config, 4, seconds, (Term("compute", seconds, "made up"),), memory, (LIMIT,), 1.0, 1.0)


def explorer_of(layouts: Layouts, made_up: MadeUp) -> Explorer:
    return Explorer(layouts, made_up, made_up, LIMIT)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_estimating_everything(seed: int) -> None:
    layouts = Layouts(run(num_layers=2), 4, frozenset(), SearchSpace(max_micro_size=2))
    made_up = MadeUp(layouts, seed)
    everything = [made_up.estimate(each) for each in layouts]
    fitting = sorted((each for each in everything if each.fits), key=order)

    explorer = explorer_of(layouts, made_up)
    assert [order(each) for each in explorer.fastest(5)] == [order(each) for each in fitting[:5]]
    assert explorer.examined < len(everything)

    of_kind = [each for each in everything if each.config.zero.stage == 3]
    kind = [each for each in fitting if each.config.zero.stage == 3]
    assert [order(each) for each in explorer.fastest(2, LayoutFilter(lambda layout: layout.zero == 3))] == [
        order(each) for each in kind[:2]
    ]
    nearest = explorer.nearest(LayoutFilter(lambda layout: layout.zero == 3))
    assert nearest is not None
    assert nearest.peak_bytes == min(each.peak_bytes for each in of_kind)

    slowest = 2 * fitting[0].step_seconds
    near = [each for each in fitting if each.step_seconds <= slowest]
    assert [order(each) for each in explorer.front(slowest, 0.0)] == [order(each) for each in pareto(near)]
    pruned = explorer.pruned()
    assert explorer.examined + sum(pruned.values()) == len(everything)


@pytest.mark.parametrize("seed", range(4))
def test_a_tolerant_front_has_something_near_every_layout(seed: int) -> None:
    layouts = Layouts(run(num_layers=2), 4, frozenset(), SearchSpace(max_micro_size=2))
    made_up = MadeUp(layouts, seed)
    front = explorer_of(layouts, made_up).front(8.0, 0.1)
    assert front == pareto(front)
    for layout in layouts:
        each = made_up.estimate(layout)
        if each.fits and each.step_seconds <= 8.0:
            assert any(
                near.step_seconds <= 1.1 * each.step_seconds and near.peak_bytes <= 1.1 * each.peak_bytes
                for near in front
            )


def test_kinds_without_layouts_have_no_fastest_or_nearest() -> None:
    layouts = Layouts(run(num_layers=2), 4, frozenset(), SearchSpace(max_micro_size=2))
    made_up = MadeUp(layouts, 0)
    explorer = explorer_of(layouts, made_up)
    assert explorer.fastest(1, LayoutFilter(lambda layout: False)) == []
    assert explorer.nearest(LayoutFilter(lambda layout: False)) is None
    assert explorer.examined == 0


def check_answers(layouts: Layouts, everything: list[Estimate], devices: int, hardware: Hardware) -> None:
    """The fastest layouts and the front are those of estimating everything."""
    fitting = sorted((each for each in everything if each.fits), key=order)
    costs = Evaluation(layouts.base, hardware, slowest_times(layouts.base, hardware, devices))
    memory = max(group.device.memory_bytes for group in hardware.groups)
    explorer = Explorer(layouts, LayoutBounds(costs, devices), costs, memory)
    assert [order(each) for each in explorer.fastest(3)] == [order(each) for each in fitting[:3]]
    if fitting:
        slowest = 1.5 * fitting[0].step_seconds
        near = [each for each in fitting if each.step_seconds <= slowest]
        assert [order(each) for each in explorer.front(slowest, 0.0)] == [order(each) for each in pareto(near)]


def size_of(share: float, everything: list[Estimate]) -> float:
    """Bytes that this share of the layouts fits."""
    sizes = sorted(each.peak_bytes for each in everything)
    return float(sizes[min(len(sizes) - 1, int(share * len(sizes)))])


@settings(max_examples=6, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([2, 4, 6]),
    share=st.floats(0.1, 1.2),
    inside=st.sampled_from([1e8, 1e10]),
    recompute=st.sampled_from([("none", "full"), ("selective",)]),
    schedules=st.sampled_from([SearchSpace().schedules, ("zb_h1", "zb_v"), ("2bw", "gpipe"), ("modular", "zb_h2")]),
)
def test_the_cost_models_best_is_that_of_estimating_everything(
    base: PretrainConfig,
    devices: int,
    share: float,
    inside: float,
    recompute: tuple[str, ...],
    schedules: tuple[str, ...],
) -> None:
    """No branch or layout is pruned that beats an answer, whether schedules flush, split backwards or loop."""
    base = replace(base, optimizer=replace(base.optimizer, clip_norm=None))
    space = SearchSpace(schedules, (), (0, 1, 3), recompute, max_micro_size=2, max_chunks=2)  # type: ignore[arg-type]
    layouts, plenty = Layouts(base, devices, frozenset(), space), machine(1e15, inside, inside / 4, 2)
    everything = [estimate(each.applied(base), plenty) for each in layouts]
    memory = size_of(share, everything)
    limited = [replace(each, memory_limits=(memory,) * len(each.memory)) for each in everything]
    assume(any(each.fits for each in limited))
    check_answers(layouts, limited, devices, machine(memory, inside, inside / 4, 2))


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
    data: int, pipeline: int, context: int, tensor: int, node: int, num_nodes: int, numbers: random.Random
) -> None:
    sizes = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
    hardware = two_groups(3e9, 2e9, node, num_nodes)
    nodes = list(range(len(hardware.nodes(data * pipeline * context * tensor))))
    numbers.shuffle(nodes)
    placement = Placement(hardware, sizes, nodes)
    least = [float("inf")] * pipeline
    for rank in range(placement.num_ranks):
        at = rank // (tensor * context) % pipeline
        least[at] = min(least[at], placement.nodes[placement.node_of_rank[rank]].device.memory_bytes)
    assert placement.memory_limits == tuple(least)


@settings(max_examples=5, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([4, 6]),
    shares=st.tuples(st.floats(0.1, 1.1), st.floats(0.1, 1.1)),
    num_nodes=st.integers(1, 2),
)
def test_unlike_devices_are_searched_like_estimating_everything(
    base: PretrainConfig, devices: int, shares: tuple[float, float], num_nodes: int
) -> None:
    space = SearchSpace(max_micro_size=2, max_chunks=2, zero_stages=(0, 1, 3), recompute=("none", "full"))
    layouts = Layouts(base, devices, frozenset(), space)
    plenty = [estimate(each.applied(base), machine(memory=1e15)) for each in layouts]
    first, second = (size_of(share, plenty) for share in shares)
    hardware = two_groups(first, second, num_nodes=num_nodes)
    check_answers(layouts, [estimate(each.applied(base), hardware) for each in layouts], devices, hardware)


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
