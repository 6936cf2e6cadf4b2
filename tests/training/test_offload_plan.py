"""Effects of a configuration's offload group: blocks that move, the choice of auto and its message, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config import ConfigError
from megapipe.config.memory import OffloadConfig, RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.text import dumps
from megapipe.spec.layers import model_layers
from megapipe.training.loop.replica import GIB, Replica
from megapipe.training.validation import validate
from tests.spec.sizes import predicted_bytes
from tests.support.gpt_runs import GPT2_SHAPE, make_config
from tests.support.meshes import run_threads

MODEL = replace(GPT2_SHAPE, num_layers=6)


def config_of(offload: dict[str, Any], recompute: dict[str, Any] | None = None, **schedule: Any) -> PretrainConfig:
    config = make_config("corpus", MODEL, schedule=schedule)
    config.offload = OffloadConfig(**offload)
    config.recompute = RecomputeConfig(**(recompute or {}))
    return config


def planned(mesh: Mesh, config: PretrainConfig) -> tuple[Any, tuple[tuple[int, ...], ...], tuple[str, ...]]:
    parallel = replace(config.parallel, data=1, pipeline=mesh.size("pipeline"))
    replica = Replica(replace(config, parallel=parallel), mesh)
    return replica.table.recomputed, replica.table.offload.units, replica.remarks


@pytest.mark.parametrize(
    ("offload", "recompute", "units"),
    [
        ({}, {}, ((1, 2, 3, 4, 5, 6),)),
        ({"every": 2}, {}, ((1, 3, 5),)),
        ({"num_blocks": 2}, {}, ((1, 2),)),
        ({"every": 3, "num_blocks": 1}, {}, ((1,),)),
        ({}, {"method": "full", "num_blocks": 4}, ((5, 6),)),
    ],
    ids=str,
)
def test_only_blocks_that_are_not_recomputed_move(
    offload: dict[str, Any], recompute: dict[str, Any], units: tuple[tuple[int, ...], ...]
) -> None:
    """Unit 0 is the embedding, unit 7 the head."""
    assert run_threads({}, planned, config_of({"activations": "blocks", **offload}, recompute))[0][1] == units


def auto(memory: float, bandwidth: float) -> dict[str, Any]:
    """memory: in blocks of one micro-batch. Blocks run at 1 GFLOP/s; bandwidth: in copies of a block a forward."""
    config = config_of({})
    tokens = config.batch.micro_size * config.data.sequence_length
    block = predicted_bytes(MODEL, model_layers(MODEL)[1], 1, config.data.sequence_length, "fp32", "sdpa")
    forward = 2 * tokens * 12 * MODEL.hidden_size**2 * 1.1 / 1e9
    return {
        "activations": "auto", "memory": memory * block / GIB, "compute": 1e-3,
        "bandwidth": bandwidth * block / forward / 1e9,
    }  # fmt: skip


def test_auto_keeps_then_moves_then_recomputes() -> None:
    recompute, units, remarks = run_threads({}, planned, config_of(auto(10.0, 2.0)))[0]
    assert (recompute, units) == ([], ())
    assert "of 6 blocks 6 keep, 0 move, 0 recompute (kkkkkk); 1 micro-batches hold" in remarks[1]
    assert remarks[0].startswith("offload auto: blocks at 0.001 TFLOP/s, copies at ")
    recompute, units, remarks = run_threads({}, planned, config_of(auto(5.0, 2.0)))[0]
    assert recompute == []
    assert len(units[0]) == 4
    recompute, units, remarks = run_threads({}, planned, config_of(auto(5.0, 1e-3)))[0]
    assert units == ()
    assert "0 move, 3 recompute" in remarks[1]
    assert sum(len(span) for span in recompute[0]) == 3


def test_auto_decides_per_stage_by_its_micro_batches() -> None:
    """1F1B on two ranks of 3 blocks: the first holds two micro-batches and the last one."""
    plans = run_threads({"pipeline": 2}, planned, config_of(auto(4.0, 1e-3), name="1f1b"))
    assert plans[0] == plans[1]
    recompute, _, remarks = plans[0]
    assert len(recompute[0]) > 0 == len(recompute[1])
    assert ["2 micro-batches" in remarks[1], "1 micro-batches" in remarks[2]] == [True, True]


def test_auto_measures_what_is_not_stated() -> None:
    offload = {**auto(5.0, 1.0), "bandwidth": None, "compute": None}
    _, _, remarks = run_threads({}, planned, config_of(offload))[0]
    assert "TFLOP/s, copies at " in remarks[0]


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"offload.memory .*: activations of the blocks of stage 0 need .* GiB"):
        run_threads({}, planned, config_of(auto(0.5, 2.0)))
    with pytest.raises(ConfigError, match=r"offload.activations blocks has nothing to move"):
        run_threads({}, planned, config_of({"activations": "blocks"}, {"method": "full"}))


def test_a_lowered_file_says_by_itself_what_moves(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[8])))
    with pytest.raises(ConfigError, match="is lowered and defines copies to host memory itself"):
        validate(config_of({"optimizer": True}, name=str(file)), 1)
