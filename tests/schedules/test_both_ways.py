"""Chimera and BitPipe: the figures and orders of their papers, and the sums over the holders of each part."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.pipeline import Pipeline
from megapipe.planner.search.space import SearchSpace
from megapipe.schedules import ScheduleError, build, dumps, loads, lower, order, rank_costs, simulate, validate
from megapipe.schedules.states import StateTable
from megapipe.training.validation import validate as validate_run
from tests.engine.library_models import SAMPLE, adoptable, loss, solo
from tests.schedules import streams
from tests.schedules.interpreter import run
from tests.schedules.interpreter_state import Broken
from tests.schedules.serial import serial
from tests.schedules.support import words

PASSES = {"chimera": 2, "bitpipe": 4}
"""Forwards and backwards of a micro-batch on each rank."""


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PASSES)), st.integers(1, 6).map(lambda half: 2 * half), st.integers(1, 3))
def test_bubbles_and_activations_are_exactly_the_papers(name, ranks, rounds):
    schedule = build(name, ranks, microbatches := rounds * ranks)
    report, passes = validate(schedule), PASSES[name]
    rates = [
        simulate(schedule, rank_costs(schedule.header, forward=1.0, backward=backward)).bubble_rate
        for backward in (1.0, 2.0)
    ]
    assert rates[0] == pytest.approx((ranks - 2) / (passes * microbatches + ranks - 2), abs=1e-12)
    if rounds == 1:
        assert rates[1] == pytest.approx((ranks - 2) / (0.75 * passes * microbatches + ranks - 2), abs=1e-12)
    inside = [min(rank, ranks - 1 - rank) for rank in range(ranks)]
    peaks = {
        "chimera": tuple(ranks / 2 + 1 + each for each in inside),
        "bitpipe": tuple((3 * ranks + 2) / 4 + each / 2 for each in inside),
    }
    assert report.peak_activations == peaks[name]
    assert report.weight_versions == (2,) * ranks


def test_orders_are_those_that_the_papers_draw():
    """Chimera's figure 3 and BitPipe's program for four ranks and four micro-batches; odd micro-batches run up."""
    assert words(order("chimera", 4, 4), 0) == "F0.0 F0.2 F7.1 B7.1 F7.3 B7.3 B0.0 B0.2"
    assert words(order("chimera", 4, 4), 1) == "F1.0 F6.1 F1.2 F6.3 B6.1 B1.0 B6.3 B1.2"
    assert words(order("bitpipe", 4, 4), 0) == (
        "F0.0 F0.2 F11.1 F12.1 F11.3 F12.3 F7.0 B7.0 F7.2 B7.2 B12.1 B11.1 B12.3 B11.3 B0.0 B0.2"
    )
    assert words(order("bitpipe", 4, 4), 1) == (
        "F1.0 F10.1 F1.2 F10.3 F13.1 F6.0 F13.3 F6.2 B6.0 B13.1 B6.2 B13.3 B10.1 B1.0 B10.3 B1.2"
    )


@pytest.mark.parametrize("name", sorted(PASSES))
@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [
        (3, 6, "runs in both directions over pairs of pipeline ranks, got 3 ranks; use an even number"),
        (4, 6, "needs a multiple of its 4 pipeline ranks as the number of micro-batches, got 6; use 8"),
        (4, 2, "got 2; use 4"),
    ],
)
def test_other_sizes_are_refused(name, ranks, microbatches, message):
    with pytest.raises(ScheduleError, match=message):
        build(name, ranks, microbatches)


def both_ways():
    return build("chimera", 2, 2)


def trains_alike(schedule):
    """Whether it runs on GPUs, and the interpreter ends in the weights of one process."""
    try:
        streams.run(schedule, 1)
        return run(schedule, 2, ordered=False) == serial(schedule.header, 2, ordered=False)
    except (Broken, streams.Hang, streams.Mismatch):
        return False


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DG3/0.1 ", "", "REDUCE_GRADIENTS stage 3, unit 0, micro-batch 1: it never happens"),
        (
            "DG3/0.1 B0/0.0@0^0 DG0/0.1",
            "B0/0.0@0^0 DG0/0.1 DG3/0.1",
            "rank 0 starts REDUCE_GRADIENTS stage 0.* at this point",
        ),
        ("DG3/0.1 ", "DG3/0.1 DG3/0.1 ", "it appears a second time"),
    ],
)
def test_sums_over_holders_are_demanded_in_one_order(old, new, message):
    text = dumps(both_ways())
    assert old in text, text
    changed = loads(text.replace(old, new))
    with pytest.raises(ScheduleError, match=message):
        validate(changed)
    assert not trains_alike(changed)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stage 3 rank 0 part 1 replica 1 units 2", "stages 1, 3 all hold part 1 and have different units"),
        ("tied 0 1", "leaves out stage 2, which holds the same part"),
    ],
)
def test_holders_must_agree(line, message):
    text = dumps(order("chimera", 2, 2))
    key = line.partition(" rank")[0]
    lines = [line if each.startswith(key + " ") else each for each in text.splitlines()]
    if line.startswith("tied"):
        lines.insert(lines.index("body"), line)
    with pytest.raises(ScheduleError, match=message):
        validate(lower(loads("\n".join(lines))))


def test_an_order_without_symmetry_starts_sums_alike():
    """Rank 1 finishes its parts in the other order than rank 0, and waits with its first sum."""
    text = dumps(order("chimera", 2, 2))
    first = next(line for line in text.splitlines() if line.startswith("rank 1:"))
    changed = lower(loads(text.replace(first, "rank 1: F2.1 F1.0 B1.0 B2.1")))
    validate(changed)
    assert trains_alike(changed)


def test_a_sum_over_holders_takes_its_time_before_updates():
    schedule = both_ways()
    free = simulate(schedule, rank_costs(schedule.header)).finish
    assert simulate(schedule, rank_costs(schedule.header, reduce_gradients=0.5)).finish > free


def test_sharded_gradients_of_shared_parts_are_refused():
    states = StateTable.uniform([1] * 4, gradient_pool=1)
    with pytest.raises(ScheduleError, match=r"stages 0, 2 hold the same part of the model.*ZeRO stage 1"):
        build("chimera", 2, 2, data_parallel=True, states=states)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_training_planning_and_the_library_refuse_both_ways(name):
    assert name in SearchSpace(schedules=(name,)).problems()[0]
    with pytest.raises(ScheduleError, match="2 routes, over copies of the model; training does not sum"):
        Pipeline(adoptable(8), solo(), loss=loss, sample=SAMPLE, microbatches=2, schedule=name)
    config = PretrainConfig(model=ModelConfig(num_layers=8, hidden_size=64, num_heads=4, max_positions=128))
    config.data = replace(config.data, prefix="shard", sequence_length=128)
    config = replace(
        config,
        schedule=replace(config.schedule, name=name),
        parallel=replace(config.parallel, pipeline=2),
        batch=replace(config.batch, micro_size=1, global_size=4),
    )
    with pytest.raises(ConfigError, match=f"schedule: {name} runs micro-batches on 2 routes"):
        validate_run(config, 2)
