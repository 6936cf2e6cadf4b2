"""Layers with strategies of their own train like all others; bytes and traffic are as predicted."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.parallel import LayerStrategy, ZeroConfig
from megapipe.layout.prediction import RankPrediction
from megapipe.layout.validation import run_problems
from megapipe.schedules import ScheduleError, build, dumps, loads, validate
from megapipe.schedules.actions import Kind
from megapipe.schedules.states import StateTable, StateUnit
from tests.distributed.test_covering import check_costs, predicted_and_counted
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, write_shard
from tests.support.layout_runs import LayoutRun

MODEL = replace(LLAMA_SHAPE, num_layers=4)
LAYERS = {
    "embedding": LayerStrategy(zero=1),
    "blocks": LayerStrategy(zero=2, recompute="full"),
    "blocks.1": LayerStrategy(zero=3, recompute="selective"),
    "blocks.2": LayerStrategy(zero=1, recompute="none"),
}
ROOM = 2 * 15_488 + 2_500
SCHEDULES: list[dict[str, Any]] = [{"name": "1f1b"}, {"name": "zb_h1"}, {"name": "interleaved_1f1b", "chunks": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["name"])
def test_layers_of_several_strategies_train_alike(tmp_path: Path, schedule: dict[str, Any]) -> None:
    prefix = write_shard(tmp_path)
    runs: list[list[tuple[RankPrediction, LayoutRun]]] = []
    for stage, layers in ((1, {}), (3, LAYERS)):
        config = replace(make_config(prefix, MODEL, schedule=schedule), zero=ZeroConfig(stage=stage))
        config.parallel = replace(config.parallel, pipeline=2, data=2, layers=layers)
        runs.append(predicted_and_counted(config))
    uniform, mixed = ([rank.run for _, rank in ranks] for ranks in runs)
    assert [each.loss for each in mixed[0].results] == pytest.approx(
        [each.loss for each in uniform[0].results], rel=1e-6
    )
    for each in runs[1]:
        check_costs(*each)
    gathered = {
        (action.stage, action.unit)
        for rank, section in itertools.product(range(2), ("prologue", "body", "epilogue"))
        for action in runs[1][0][1].schedule.actions(section, rank)  # type: ignore[arg-type]
        if action.kind == Kind.GATHER_WEIGHTS
    }
    units = runs[1][0][1].schedule.header.units_per_stage
    layers = [(stage, unit) for stage, count in enumerate(units) for unit in range(count)]
    assert {layers.index(place) for place in gathered} == {2, 5}  # blocks.1, and the head, which has zero.stage


@pytest.mark.slow
def test_pools_limited_in_bytes_hold_what_fits(tmp_path: Path) -> None:
    """Two blocks and one of the small ends, where a pool of two layers has two; trained to the same bits."""
    prefix, limit = write_shard(tmp_path), ROOM * 4 / 2**30
    runs: list[list[tuple[RankPrediction, LayoutRun]]] = []
    for zero in (ZeroConfig(stage=3), ZeroConfig(stage=3, weight_memory=limit, gradient_memory=2 * limit)):
        config = replace(make_config(prefix, MODEL), zero=zero)
        config.parallel = replace(config.parallel, data=2)
        runs.append(predicted_and_counted(config))
    layers, by_bytes = ([rank.run for _, rank in ranks] for ranks in runs)
    assert [each.loss for each in by_bytes[0].results] == [each.loss for each in layers[0].results]
    schedule = runs[1][0][1].schedule
    sizes = {unit.layer: unit.size for unit in schedule.header.stage_states[0]}
    assert 2 * sizes[1] + sizes[0] < schedule.header.states.weight_pool == ROOM < 2 * sizes[1] + sizes[0] + sizes[5]
    gathers = [
        [rank.schedule.sections.body[0][:, 0].tolist().count(Kind.GATHER_WEIGHTS) for _, rank in ranks]
        for ranks in runs
    ]
    assert gathers[1][0] < gathers[0][0]
    for predicted, rank in runs[1]:
        check_costs(predicted, rank)
        assert 2 * sizes[1] * 4 < predicted.peak().weights <= ROOM * 4
    config.zero = ZeroConfig(stage=3, weight_memory=1e-6)
    (problem,) = run_problems(config, 2)
    assert problem.startswith("zero.weight_memory is 1e-06 GiB, but the largest layer needs 5.77e-05")


def test_a_schedule_keeps_the_stages_of_its_units() -> None:
    """In its text form too; and a gather of whole weights, or two sums of a whole gradient, are refused."""
    whole, both = StateUnit(0), StateUnit(1, "sharded", sharded_gradients=True)
    units = ((whole, both), (StateUnit(0, sharded_gradients=True), StateUnit(1)))
    schedule = build(
        "1f1b", 2, 4, units_per_stage=(2, 2), data_parallel=True, states=StateTable(units, 1, 1)
    )  # fmt: skip
    text = dumps(schedule)
    assert dumps(loads(text)) == text
    assert loads(text).header.states.units == units
    line = "state 0/0\nstate 0/1 weights sharded gradients sharded"
    for others, problem in (
        ("state 0/0-1 weights sharded gradients sharded", "the weights of its unit are not gathered"),
        ("state 0/0 weights sharded\nstate 0/1 gradients sharded", "are whole"),
        ("state 0/1-2 weights sharded", "does not name layers"),
        ("state 0/1 weights sharded weights host", "or appears twice"),
        ("state 0/1 weights split", "'split' is not one of sharded, host"),
    ):
        with pytest.raises(ScheduleError, match=problem):
            validate(loads(text.replace(line, others)))
    with pytest.raises(ScheduleError, match="has state units of 1 stages, but has 2"):
        build("1f1b", 2, 4, units_per_stage=(2, 2), data_parallel=True, states=StateTable(units[:1], 1, 1))


def test_files_of_format_1_shard_what_they_did() -> None:
    text = """megapipe schedule 1
name mine
microbatches 1
data_parallel yes
weight_buffers 1
whole_gradients 2
stage 0 rank 0 units 3
ZERO
body
rank 0: F0.0 B0.0
"""
    sharded = [StateUnit(layer, "sharded", sharded_gradients=True) for layer in range(3)]
    assert loads(text.replace("ZERO", "")).header.states == StateTable((tuple(sharded),), 1, 2)
    only_gradients = sharded[1]._replace(weights="whole")
    mixed = (StateUnit(0), only_gradients, sharded[2])
    assert loads(text.replace("ZERO", "zero 1 2 3")).header.states == StateTable((mixed,), 1, 2)
    for others in ("zero 1 3 1 2", "zero 1"):
        with pytest.raises(ScheduleError, match="give one for each unit"):
            loads(text.replace("ZERO", others))
    with pytest.raises(ScheduleError, match="unknown header line 'state'"):
        loads(text.replace("ZERO", "state 0/1"))
