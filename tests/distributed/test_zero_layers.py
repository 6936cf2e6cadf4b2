"""Layers that shard less than zero.stage: trained like all others, and sent and held to the byte as predicted."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.config.zero import ZeroConfig
from megapipe.layout.prediction import predict_rank
from megapipe.schedules import ScheduleError, build, dumps, loads, validate
from megapipe.schedules.actions import Kind
from tests.distributed.test_covering import check_costs
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, write_shard
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.meshes import run_mesh

MODEL = replace(LLAMA_SHAPE, num_layers=4)
LAYER_STAGES = {"embedding": 1, "blocks": 2, "blocks.1": 3, "blocks.2": 1}
SCHEDULES: list[dict[str, Any]] = [{"name": "1f1b"}, {"name": "zb_h1"}, {"name": "interleaved_1f1b", "chunks": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["name"])
def test_layers_of_several_zero_stages_train_alike(tmp_path: Path, schedule: dict[str, Any]) -> None:
    prefix = write_shard(tmp_path)
    runs: list[list[LayoutRun]] = []
    for zero in (ZeroConfig(stage=1), ZeroConfig(stage=3, layer_stages=LAYER_STAGES)):
        config = replace(make_config(prefix, MODEL, schedule=schedule), zero=zero)
        config.parallel = replace(config.parallel, pipeline=2, data=2)
        runs.append(run_mesh({"pipeline": 2, "data": 2}, run_layout, config, timeout=120.0))
    uniform, mixed = ([rank.run for rank in ranks] for ranks in runs)
    assert [each.loss for each in mixed[0].results] == pytest.approx(
        [each.loss for each in uniform[0].results], rel=1e-6
    )
    for number, rank in enumerate(runs[1]):
        check_costs(predict_rank(config, rank.schedule, number, predictions=rank.predictions), rank)
    gathered = {
        (action.stage, action.unit)
        for rank, section in itertools.product(range(2), ("prologue", "body", "epilogue"))
        for action in runs[1][0].schedule.actions(section, rank)  # type: ignore[arg-type]
        if action.kind == Kind.GATHER_WEIGHTS
    }
    units = runs[1][0].schedule.header.units_per_stage
    layers = [(stage, unit) for stage, count in enumerate(units) for unit in range(count)]
    assert {layers.index(place) for place in gathered} == {2, 5}  # blocks.1, and the head, which has zero.stage


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"block": 1}, "zero.layer_stages names 'block', which is not a layer; use embedding, head, blocks, or one"),
        ({"blocks": 3}, "zero.layer_stages {blocks: 3} must be from 1 to zero.stage, which is 2"),
        ({"blocks": 0}, "zero.layer_stages {blocks: 0} must be from 1 to zero.stage, which is 2"),
    ],
)
def test_wrong_stages_are_refused(stages: dict[str, int], message: str) -> None:
    (problem,) = ZeroConfig(stage=2, layer_stages=stages).problems()
    assert problem.startswith(message)


def test_a_block_that_the_model_lacks_is_refused() -> None:
    config = PretrainConfig(model=MODEL, zero=ZeroConfig(stage=3, layer_stages={"blocks.3": 1, "blocks.4": 1}))
    (problem,) = [each for each in config.problems() if "layer_stages" in each]
    assert problem.startswith(
        "zero.layer_stages names blocks.4, but model.num_layers is 4: blocks are numbered from 0"
    )


def test_a_schedule_keeps_the_stages_of_its_units() -> None:
    """In its text form too; and a gather of whole weights, or two sums of a whole gradient, are refused."""
    schedule = build(
        "1f1b", 2, 4, units_per_stage=(2, 2), data_parallel=True, weight_buffers=1, whole_gradients=1,
        zero_stages=((1, 3), (2, 1)),
    )  # fmt: skip
    text = dumps(schedule)
    assert dumps(loads(text)) == text
    assert loads(text).header.zero_stages == ((1, 3), (2, 1))
    for others, problem in (("zero 3 3", "the weights of its unit are not gathered"), ("zero 1 2", "are whole")):
        with pytest.raises(ScheduleError, match=problem):
            validate(loads(text.replace("zero 1 3", others)))
    for others in ("zero 1 3 1", "zero 1"):
        with pytest.raises(ScheduleError, match="give one for each unit"):
            validate(loads(text.replace("zero 1 3", others)))
    with pytest.raises(ScheduleError, match=r"units by stage, but stages have \[2, 2\] units"):
        build("1f1b", 2, 4, units_per_stage=(2, 2), data_parallel=True, weight_buffers=1, zero_stages=((1, 3),))
