"""Offload on a GPU: the bits of a run that moves nothing, in less memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_threads

pytestmark = pytest.mark.gpu

EVERYTHING = {"activations": "blocks", "optimizer": True}
STEPS = 6


def config_of(folder: Path, precision: str, **schedule: Any) -> PretrainConfig:
    model = replace(GPT2_SHAPE, num_layers=8, hidden_size=512, num_heads=8, max_positions=512, attention="unfused")
    config = make_config(write_shard(folder, documents=400), model, schedule=schedule)
    config.data = replace(config.data, sequence_length=512)
    config.batch = replace(config.batch, micro_size=4, global_size=16)
    config.training = replace(config.training, precision=precision)
    return config


def run_and_peak(mesh: Mesh, config: PretrainConfig) -> tuple[RankRun, int]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = run_gpt(mesh, config, STEPS)
    return run, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("offload", [EVERYTHING, EVERYTHING | {"weights": True}], ids=str)
def test_offload_gives_the_same_bits_with_less_memory(
    tmp_path: Path, schedule: str, precision: str, offload: dict[str, Any]
) -> None:
    config = config_of(tmp_path, precision, name=schedule)
    plain, everything = run_threads({}, run_and_peak, config, device="cuda")[0]
    config.offload = OffloadConfig(**offload)
    moved, less = run_threads({}, run_and_peak, config, device="cuda")[0]
    check_bits([moved], plain)
    assert less < 0.8 * everything
