"""Bounds never exceed the estimates of their layouts, and work that layouts share changes no number."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapipe.config.parallel import LayerStrategy, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.stages import StageLayout, layers_of
from megapipe.layout.units import GIB, StateUnits
from megapipe.planner.cost.estimate import ENGINE, Assumptions
from megapipe.planner.cost.layer_times import shared
from megapipe.planner.cost.memory import cut_of
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.measured import MeasuredTimes
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.plan import Effort, search_speed, slowest_times
from megapipe.planner.search.space import Branch, Layout, Layouts, SearchSpace, Shape
from megapipe.schedules import Kind, order
from megapipe.schedules.actions import KIND, STAGE
from megapipe.schedules.registry import GENERATORS, Options
from megapipe.spec.ops import ELEMENT_BYTES
from tests.planner.measured import machines
from tests.planner.search.runs import machine, run, runs
from tests.schedules.support import TRAINED, fewest_microbatches

BOUNDED = [name for name in TRAINED if name != "seq1f1b"]
"""Slices are not planned."""


@st.composite
def searches(draw: st.DrawFn, schedule: str) -> tuple[PretrainConfig, Hardware, int, list[Layout]]:
    """A run, a machine, its devices, and some of the layouts that a search would compare: where there are any, those
    of several pipeline ranks, which bounds of schedules are about."""
    base, takes_groups = draw(runs()), "group_size" in GENERATORS[schedule].order_options
    base = replace(
        base,
        model=replace(base.model, num_layers=draw(st.sampled_from([base.model.num_layers, 12, 18, 25]))),
        batch=replace(base.batch, global_size=draw(st.sampled_from([base.batch.global_size, 24, 33, 48, 64]))),
        optimizer=replace(base.optimizer, clip_norm=None),
        schedule=replace(
            base.schedule,
            name=schedule,
            two_bp=GENERATORS[schedule].takes_two_bp and draw(st.booleans()),
            group_size=draw(st.sampled_from([None, None, 1, 5])) if takes_groups else None,
        ),
    )
    inside = draw(st.sampled_from([1e8, 1e10, 1e12]))
    hardware = machine(1e15, inside, inside / 10, draw(st.sampled_from([2, 3, 4, 8])))
    devices = draw(st.sampled_from([2, 4, 6, 8, 12, 16]))
    layouts = list(Layouts(base, devices, frozenset(), SearchSpace(schedules=(schedule,), max_context=4)))
    layouts = [each for each in layouts if each.shape.pipeline > 1] or layouts
    # Most layouts have no sequence parallelism: without this, chunks of it would hardly ever be among the few.
    kinds = sorted({(each.sequence, each.shape.context > 1) for each in layouts}, reverse=True)
    chosen = draw(st.sampled_from(kinds)) if kinds else None
    layouts = [each for each in layouts if (each.sequence, each.shape.context > 1) == chosen]
    some = draw(st.randoms(use_true_random=False)).sample(layouts, min(6, len(layouts)))
    return base, hardware, devices, some


def check_bounds(base: PretrainConfig, hardware: Hardware, devices: int, layouts: list[Layout]) -> None:
    times = slowest_times(base, hardware, devices)
    costs = Evaluation(base, hardware, times)
    bounds = LayoutBounds(costs, devices)
    for layout in layouts:
        seconds, num_bytes = (each[0] for each in bounds.of(layout.shape, (layout[1:],)))
        exact = estimate(layout.applied(base), hardware)
        branch = Branch(*layout.shape[:5])
        sizes = [size * branch.micro_size for size in (1, 2, 5)]
        of_mesh = bounds.of_mesh(branch._replace(micro_size=None), sizes, [layout[1:]])
        of_branch = bounds.of_branch(branch, [layout.shape], [layout[1:]])
        for least in (of_mesh, of_branch):
            assert 0 <= least[0] <= exact.step_seconds * (1 + 1e-9)
            assert 0 < least[1] <= exact.peak_bytes * (1 + 1e-9)
        assert 0 <= seconds <= exact.step_seconds * (1 + 1e-9)
        assert 0 < bounds.closer(layout) <= exact.step_seconds
        assert 0 < num_bytes <= exact.peak_bytes * (1 + 1e-9)
        assert 0 < costs.least_bytes(layout) <= exact.peak_bytes
        assert 0 <= costs.least_seconds(layout) <= exact.step_seconds


@pytest.mark.parametrize("schedule", BOUNDED)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_bounds_hold(schedule: str, data: st.DataObject) -> None:
    check_bounds(*data.draw(searches(schedule)))


def test_bounds_hold_with_one_microbatch() -> None:
    """The head's tensors are freed before the last block's backward recomputes its own."""
    base = run(num_layers=3, vocabulary_size=2000, hidden_size=96, num_heads=3)
    base = replace(base, batch=replace(base.batch, global_size=24))
    layout = Layout(Shape(1, 1, 2, 1, 24, "1f1b", None), 0, 0, "full")
    check_bounds(base, machine(1e15, 1e10, 1e9, 2), 2, [layout])


@settings(max_examples=15, deadline=None)
@given(base=runs(), pipeline=st.integers(1, 2), sequence=st.sampled_from([1, 4]))
def test_only_split_backwards_wait_in_their_weight_half(base: PretrainConfig, pipeline: int, sequence: int) -> None:
    """The simulator times each backward by its kind; the rest is when sums of norms' gradients start."""
    shape = Shape(1, 2, pipeline, 1, 1, "dualpipe_v", None)
    base = replace(
        base, model=replace(base.model, num_layers=2 * pipeline, num_heads=4, num_kv_heads=None, mtp_layers=0)
    )
    layout, hardware = Layout(shape, sequence, 0, "none"), machine(1e15, 1e9, 1e9)
    exact = predict(layout.applied(base), hardware).estimate.step_seconds
    costs = Evaluation(base, hardware, slowest_times(base, hardware, 2 * pipeline))
    assert costs.estimate(layout).step_seconds == pytest.approx(exact, rel=0.01)
    assert costs.least_seconds(layout) <= exact * 1.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", BOUNDED)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bounds_hold_in_thousands_of_layouts(schedule: str, data: st.DataObject) -> None:
    check_bounds(*data.draw(searches(schedule)))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), apart=st.sampled_from([1, 1, 2, 4]), inside=st.sampled_from([1e9, 1e10, 1e12]))
def test_bounds_hold_with_experts_sharded_apart(data: st.DataObject, apart: int, inside: float) -> None:
    base, hardware = run(num_experts=4, experts_per_token=2), machine(1e15, inside, inside / 10)
    base = replace(base, batch=replace(base.batch, global_size=48), zero=ZeroConfig(stage=1, expert_shard_size=apart))
    schedules = data.draw(st.sampled_from([("1f1b",), ("zb_h1",), ("interleaved_1f1b",)]))
    layouts = list(Layouts(base, 8, frozenset(), SearchSpace(schedules=schedules, max_context=2)))
    layouts = [each for each in layouts if each.shape.data * each.shape.context % apart == 0]
    check_bounds(base, hardware, 8, data.draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=4)))


@settings(max_examples=10, deadline=None)
@given(data=st.data(), layers=st.sampled_from([1.05, 100.0]))
def test_bounds_hold_with_pools_limited_in_bytes(data: st.DataObject, layers: float) -> None:
    base, hardware = run(num_layers=12, vocabulary_size=64), machine(1e15, 1e8, 1e7)
    sized = replace(base, zero=ZeroConfig(stage=3, weight_buffers=1, gradient_memory=1.0))
    elements = layers * StateUnits(sized, StageLayout.of(sized), 8).table().weight_pool
    width = ELEMENT_BYTES[base.training.precision]
    zero = ZeroConfig(stage=3, weight_memory=elements * width / GIB, gradient_memory=elements * 4 / GIB)
    base = replace(base, zero=zero, batch=replace(base.batch, global_size=48))
    schedules = data.draw(st.sampled_from([("1f1b",), ("gpipe",), ("interleaved_1f1b",)]))
    layouts = list(Layouts(base, 8, frozenset({"zero.stage"}), SearchSpace(schedules=schedules)))
    check_bounds(base, hardware, 8, data.draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=4)))


MIXED: list[dict[str, Any]] = [
    {"num_layers": 9, "layer_kinds": {"local": {"sliding_window": 8}}, "layer_pattern": ("local", "local", "base")},
    {
        "num_layers": 7,
        "num_experts": 4,
        "layer_kinds": {"dense": {"num_experts": None, "ffn_hidden_size": 3000}},
        "layer_pattern": ("dense", "base", "base", "base", "base", "base", "base"),
    },
    {"layer_kinds": {"wide": {"ffn_hidden_size": 4096}}, "layer_pattern": ("base", "base", "wide", "base")},
]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), mixed=st.sampled_from(MIXED))
def test_bounds_hold_where_blocks_differ(data: st.DataObject, mixed: dict[str, Any]) -> None:
    base, hardware = run(**mixed), machine(1e15, 1e10, 1e9)
    schedules = data.draw(st.sampled_from([("1f1b",), ("zb_h1",), ("interleaved_1f1b",), ("2bw",)]))
    layouts = list(Layouts(base, 8, frozenset(), SearchSpace(schedules=schedules, max_context=2)))
    check_bounds(base, hardware, 8, data.draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=4)))


def test_bounds_are_near_enough_to_prune() -> None:
    """Search a model that consists mostly of blocks, on links that are not the bottleneck."""
    base = run(num_layers=16, hidden_size=1024, num_heads=8)
    hardware = machine(memory=1e15, inside=1e12, outside=1e12)
    bounds = LayoutBounds(Evaluation(base, hardware, slowest_times(base, hardware, 8)), 8)
    shares = []
    for layout in list(Layouts(base, 8, frozenset(), SearchSpace()))[::40]:
        seconds, num_bytes = (each[0] for each in bounds.of(layout.shape, (layout[1:],)))
        exact = estimate(layout.applied(base), hardware)
        shares.append((seconds / exact.step_seconds, num_bytes / exact.peak_bytes))
    times, sizes = (sorted(each) for each in zip(*shares, strict=True))
    assert times[len(times) // 2] > 0.75
    assert sizes[len(sizes) // 2] > 0.75


def test_a_layout_that_cannot_fit_has_no_time() -> None:
    base = run()
    hardware = machine(memory=1e6)
    bounds = LayoutBounds(Evaluation(base, hardware, slowest_times(base, hardware, 2)), 2)
    shape = Shape(2, 1, 1, 1, 1, "1f1b", None)
    seconds, num_bytes = bounds.of(shape, ((0, 0, "none"),))
    assert seconds.tolist() == [float("inf")]
    assert num_bytes[0] > 1e6


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([name for name in TRAINED if GENERATORS[name].held]),
    pipeline=st.integers(1, 6),
    chunks=st.integers(2, 4),
    count=st.integers(1, 20),
    group=st.sampled_from([None, 1, 2, 5]),
    two_bp=st.booleans(),
)
@example(schedule="interleaved_1f1b", pipeline=1, chunks=2, count=4, group=5, two_bp=False)
def test_no_rank_holds_fewer_micro_batches(
    schedule: str, pipeline: int, chunks: int, count: int, group: int | None, two_bp: bool
) -> None:
    generator, options = GENERATORS[schedule], Options()
    chunks = chunks if "chunks" in generator.order_options else generator.chunks
    count = max(count, fewest_microbatches(generator.name, pipeline))
    if "group_size" in generator.order_options and group is not None:
        options["group_size"] = group
    if chunks != generator.chunks:
        options["chunks"] = chunks
    if two_bp and generator.takes_two_bp:
        options["two_bp"] = True
    assert generator.held is not None
    least = generator.held(pipeline, count, chunks, options)
    assert least.shape == (pipeline, chunks)
    compute = order(schedule, pipeline, count, **options)
    for rank, rows in enumerate(compute.expand(compute.prologue_steps or 1)):
        own, in_flight = compute.header.stages_on(rank), np.zeros((len(rows), chunks))
        for row, (kind, stage) in enumerate(rows[:, [KIND, STAGE]].tolist()):
            in_flight[row, own.index(stage)] = (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        assert (in_flight.cumsum(axis=0) >= least[rank]).all(axis=1).any()


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


@pytest.mark.parametrize("stage", [2, 3])
def test_the_bound_of_whole_layers_is_what_ranks_hold(stage: int) -> None:
    base = replace(run(num_layers=12), batch=replace(run().batch, global_size=48), zero=ZeroConfig(stage=stage))
    hardware = machine(1e15, 1e10, 1e9)
    costs = Evaluation(base, hardware, slowest_times(base, hardware, 8))
    layout = Layout(Shape(4, 1, 2, 1, 1, "1f1b", None), 0, stage, "none")
    held = [memory.buffers for memory in costs.estimate(layout).memory]
    assert costs.states(layout).least_buffers(cut_of(costs.run(layout))).tolist() == held
