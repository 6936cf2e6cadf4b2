"""Branch and bound compared with exhaustive estimates: with an artificial cost and bounds, and with the cost model."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.estimate import Estimate, RankMemory, Term
from megapipe.planner.cost.model import estimate
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
    zeros = (0, 1, 3)
    space = SearchSpace(schedules, (), zeros, recompute, max_micro_size=2, max_chunks=2)  # type: ignore[arg-type]
    plenty = machine(memory=1e15, inside=inside, outside=inside / 4, node=2)
    layouts = Layouts(base, devices, frozenset(), space)
    everything = [estimate(each.applied(base), plenty) for each in layouts]
    sizes = sorted(each.peak_bytes for each in everything)
    memory = float(sizes[min(len(sizes) - 1, int(share * len(sizes)))])
    hardware = machine(memory=memory, inside=inside, outside=inside / 4, node=2)
    fitting = sorted((replace(each, memory_limits=(memory,) * len(each.memory)) for each in everything), key=order)
    fitting = [each for each in fitting if each.fits]
    assume(fitting)
    times = slowest_times(base, hardware, devices)
    costs = Evaluation(base, hardware, times)
    explorer = Explorer(layouts, LayoutBounds(costs, devices), costs, memory)
    assert [order(each) for each in explorer.fastest(3)] == [order(each) for each in fitting[:3]]
    slowest = 1.5 * fitting[0].step_seconds
    near = [each for each in fitting if each.step_seconds <= slowest]
    assert [order(each) for each in explorer.front(slowest, 0.0)] == [order(each) for each in pareto(near)]
