"""Experts as a state unit of their own, which another number of replicas shares than the rest of their block."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.parallel import ZeroConfig
from megapipe.schedules import dumps, loads
from tests.distributed.test_covering import check_costs, predicted_and_counted
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, write_shard
from tests.support.layout_runs import run_layout
from tests.support.meshes import run_threads

MODEL = replace(LLAMA_SHAPE, num_experts=4, experts_per_token=4)


@pytest.mark.parametrize(
    ("sizes", "experts", "stage"),
    [
        ({"data": 4}, 2, 2),
        pytest.param({"data": 4}, 2, 3, marks=pytest.mark.exhaustive),
        pytest.param({"pipeline": 2, "data": 2}, 1, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_experts_shared_by_other_replicas_train_alike(
    tmp_path: Path, sizes: dict[str, int], experts: int, stage: int
) -> None:
    config = make_config(write_shard(tmp_path), MODEL, schedule={"name": "1f1b"})
    [alone] = run_threads({}, run_layout, config)
    config.zero = ZeroConfig(stage=stage, expert_shard_size=experts)  # type: ignore[arg-type]
    config.parallel = replace(config.parallel, **sizes)
    ranks = predicted_and_counted(config)
    losses, expected = ([each.loss for each in rank.run.results] for rank in (ranks[0][1], alone))
    assert losses == pytest.approx(expected, rel=1e-6)
    for each in ranks:
        check_costs(*each)
    schedule = ranks[0][1].schedule
    own, apart_unit = (unit for unit in schedule.header.stage_states[0] if unit.layer == 1)
    assert (own.shards, apart_unit.shards) == (0, experts)
    assert (own.weights == "sharded", apart_unit.weights == "sharded") == (stage == 3, stage == 3 and experts > 1)
    assert loads(dumps(schedule)) == schedule
