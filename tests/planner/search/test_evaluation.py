"""Work that layouts share in the search changes no number: compared with the cost model of single layouts."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.parallel import LayerStrategy
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import layers_of
from megapipe.planner.cost.estimate import ENGINE, Assumptions
from megapipe.planner.cost.layer_times import shared
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.measured import MeasuredTimes
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.plan import Effort, search_speed, slowest_times
from megapipe.planner.search.space import Layouts, SearchSpace
from tests.planner.measured import machines
from tests.planner.search.runs import machine, run, runs

SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "zb_h1", "zb_v", "2bw")
OWN_ZERO = ({}, {}, {"embedding": LayerStrategy(zero=1)}, {"blocks.0": LayerStrategy(zero=1)})
OTHERS = (
    ENGINE,
    Assumptions(slow_down=1.7, gathers_beside_forward=True),
    Assumptions(scattered_sends=True, waits_for_sends=True, megatron_kernels=True),
)


@settings(max_examples=30, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([2, 4, 6, 8, 12]),
    node=st.sampled_from([2, 3, 4]),
    assumptions=st.sampled_from(OTHERS),
    own=st.sampled_from(OWN_ZERO),
    optimizer=st.sampled_from(["adamw", "muon"]),
    logits=st.booleans(),
    numbers=st.randoms(use_true_random=False),
)
def test_layouts_of_one_search_cost_what_each_costs_alone(
    base: PretrainConfig,
    devices: int,
    node: int,
    assumptions: Assumptions,
    own: dict[str, LayerStrategy],
    optimizer: str,
    logits: bool,
    numbers: Random,
) -> None:
    base, hardware = replace(base, parallel=replace(base.parallel, layers=own)), machine(memory=1e15, node=node)
    base.optimizer, base.recompute = replace(base.optimizer, name=optimizer), replace(base.recompute, logits=logits)
    layouts = list(Layouts(base, devices, frozenset(), SearchSpace(schedules=SCHEDULES, max_context=2)))
    alone = slowest_times(base, hardware, devices, assumptions)
    times = shared(alone)
    together = Evaluation(base, hardware, times, assumptions)
    bounds = LayoutBounds(together, devices)
    some = numbers.sample(layouts, min(30, len(layouts)))
    for layout in some:
        config = layout.applied(base)
        assert all(times.of(config, layer) == alone.of(config, layer) for layer in layers_of(config))
    for layout in some[:12]:
        config = layout.applied(base)
        expected = estimate(config, hardware, assumptions=assumptions)
        assert together.num_bytes(layout) == expected.peak_bytes
        assert together.estimate(layout) == expected
        assert bounds.of(layout.shape, (layout[1:],))[0][0] <= expected.step_seconds * (1 + 1e-9)


def test_measured_layers_are_shared_as_well() -> None:
    """Halves of backwards that run apart take other times than whole ones: schedules with them share with none of the
    others."""
    base, hardware = machines.run(), machines.machine()
    times = MeasuredTimes(hardware)
    assert shared(times) is times
    together = Evaluation(base, hardware, times)
    layouts = list(Layouts(base, 4, frozenset(), SearchSpace(schedules=("1f1b", "zb_h1"), max_micro_size=2)))
    for layout in layouts[::7]:
        assert together.estimate(layout) == estimate(layout.applied(base), hardware, times=times)


def test_a_search_holds_the_assumptions_that_it_is_given() -> None:
    base, hardware = run(num_layers=6), machine()
    assumptions = replace(OTHERS[2], slow_down=1.7, gathers_beside_forward=True)
    space = SearchSpace(max_micro_size=2, max_chunks=2)
    effort = Effort(keep=3, actions=0, alternatives=False)
    findings = search_speed(base, hardware, 2, space=space, effort=effort, assumptions=assumptions)
    own = search_speed(base, hardware, 2, space=space, effort=effort)
    for each in (*findings.ranked, *findings.pareto):
        again = estimate(each.config, hardware, assumptions=assumptions)
        assert each.estimate.step_seconds == pytest.approx(again.step_seconds)
    assert findings.best.estimate.step_seconds != own.best.estimate.step_seconds
    layouts = [layout.applied(base) for layout in Layouts(base, 2, frozenset(), space)]
    every = [estimate(each, hardware, assumptions=assumptions) for each in layouts]
    best = min(each.step_seconds for each in every if each.fits)
    assert findings.best.estimate.step_seconds <= best * (1 + 1e-9)
    effort = replace(effort, actions=10_000)
    simulated = search_speed(base, hardware, 2, space=space, effort=effort, assumptions=assumptions).best
    exact = predict(simulated.config, hardware, assumptions=assumptions).estimate
    assert simulated.simulated
    assert simulated.estimate.step_seconds == pytest.approx(exact.step_seconds)
