"""Chimera and BitPipe: the figures of their papers, and the sums over the holders of each part."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.engine.pipeline import Pipeline
from megapipe.planner.search.space import SearchSpace
from megapipe.schedules import ScheduleError, build, dumps, loads, lower, order, rank_costs, simulate, validate
from megapipe.training.validation import validate as validate_run
from tests.engine.library_models import SAMPLE, adoptable, loss, solo
from tests.schedules import streams
from tests.schedules.interpreter import run
from tests.schedules.serial import serial
from tests.support.gpt_runs import GPT2_SHAPE, make_config

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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("part 1 replica 1", "part 1 replica 1 units 2", "stages 1, 3 all hold part 1 and have different units"),
        ("body", "tied 0 1\nbody", "leaves out stage 2, which holds the same part"),
    ],
)
def test_holders_must_agree(old, new, message):
    text = dumps(order("chimera", 2, 2))
    assert text.count(old) == 1, text
    with pytest.raises(ScheduleError, match=message):
        validate(lower(loads(text.replace(old, new))))


def test_an_order_without_symmetry_starts_sums_alike():
    """Rank 1 finishes its parts in the other order than rank 0, and waits with its first sum."""
    text = dumps(order("chimera", 2, 2))
    assert "F1.0 B1.0 B2.1" in text
    changed = lower(loads(text.replace("F1.0 B1.0 B2.1", "F1.0 B2.1 B1.0")))
    validate(changed)
    streams.run(changed, 1)
    assert run(changed, 2, ordered=False) == serial(changed.header, 2, ordered=False)


def test_a_sum_over_holders_takes_its_time_before_updates():
    schedule = build("chimera", 2, 2)
    free = simulate(schedule, rank_costs(schedule.header)).finish
    assert simulate(schedule, rank_costs(schedule.header, reduce_gradients=0.5)).finish > free


@pytest.mark.parametrize("name", sorted(PASSES))
def test_training_planning_and_the_library_refuse_both_ways(name):
    assert name in SearchSpace(schedules=(name,)).problems()[0]
    with pytest.raises(ScheduleError, match="2 routes, over copies of the model; training does not sum"):
        Pipeline(adoptable(8), solo(), loss=loss, sample=SAMPLE, microbatches=2, schedule=name)
    groups = {"schedule": {"name": name}, "parallel": {"pipeline": 2}, "batch": {"global_size": 4}}
    config = make_config("shard", replace(GPT2_SHAPE, num_layers=8), **groups)
    with pytest.raises(ConfigError, match=f"schedule: {name} runs micro-batches on 2 routes"):
        validate_run(config, 2)
