"""Experts as a state unit of their own, which another number of replicas shares than the rest of their block."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.parallel import ZeroConfig
from megapipe.layout.prediction import RankPrediction
from megapipe.schedules import dumps, loads
from tests.distributed.test_covering import check_costs, predicted_and_counted
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, write_shard
from tests.support.layout_runs import LayoutRun

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
    prefix = write_shard(tmp_path)
    runs: list[list[tuple[RankPrediction, LayoutRun]]] = []
    for apart in (None, experts):
        config = make_config(prefix, MODEL, schedule={"name": "1f1b"})
        config.zero = ZeroConfig(stage=stage, expert_shard_size=apart)  # type: ignore[arg-type]
        config.parallel = replace(config.parallel, **sizes)
        runs.append(predicted_and_counted(config))
    together, split = ([rank.run for _, rank in ranks] for ranks in runs)
    assert [each.loss for each in split[0].results] == pytest.approx(
        [each.loss for each in together[0].results], rel=1e-6
    )
    for each in runs[1]:
        check_costs(*each)
    schedule = runs[1][0][1].schedule
    own, apart_unit = (unit for unit in schedule.header.stage_states[0] if unit.layer == 1)
    assert (own.shards, apart_unit.shards) == (0, experts)
    assert (own.weights == "sharded", apart_unit.weights == "sharded") == (stage == 3, stage == 3 and experts > 1)
    assert loads(dumps(schedule)) == schedule
