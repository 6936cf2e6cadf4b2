"""Four ranks that share out all state train a model three times as large as one rank can under the same limit."""

import ctypes
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from megapipe.training.loop.batches import open_loader, split_samples
from megapipe.training.loop.replica import Replica
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, write_shard
from tests.support.meshes import run_mesh
from tests.support.ranks import RankError

MODEL = replace(LLAMA_SHAPE, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_hidden_size=1024)
LIMIT = 320 * 2**20
FEW, MANY = 16, 30
"""Blocks that one rank surely trains within the limit, and surely not."""


def config_of(corpus: str, blocks: int, data: int, global_size: int = 1, **groups: dict[str, Any]) -> PretrainConfig:
    model = replace(MODEL, num_layers=blocks)
    return make_config(corpus, model, parallel={"data": data}, batch={"global_size": global_size}, **groups)


def state_bytes(blocks: int) -> int:
    """fp32 weights, gradients and two moments."""
    model = replace(MODEL, num_layers=blocks)
    return 16 * sum(spec.num_elements for layer in model_layers(model) for spec in layer.parameters.values())


def without_a_heap() -> None:
    """Let glibc map every larger buffer by itself, so that what is freed is gone and holes count for nothing."""
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 2**16) == 1


def trained(mesh: Mesh, config: PretrainConfig) -> list[float]:
    """Losses of two steps under the limit, which counts from what the process has after a small model."""
    without_a_heap()
    train(
        mesh, replace(config, model=replace(config.model, num_layers=1), schedule=replace(config.schedule, chunks=3))
    )
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, used + LIMIT))
    return train(mesh, config)


def train(mesh: Mesh, config: PretrainConfig) -> list[float]:
    replica = Replica(config, mesh)
    loader = open_loader(config, mesh, replica, split_samples(config, "train"))
    losses = []
    for step in range(2):
        batch = loader.load(step * config.batch.global_size)
        losses.append(replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, 1e-3)).loss)
    return losses


def train_alone(corpus: str, blocks: int) -> None:
    layered = {"name": "modular", "chunks": blocks + 2}
    run_mesh({}, trained, config_of(corpus, blocks, 1, schedule=layered), timeout=300.0)


def largest_alone(corpus: str) -> int:
    """Blocks that one rank just trains."""
    train_alone(corpus, FEW)
    for blocks in range(FEW + 1, MANY):
        try:
            train_alone(corpus, blocks)
        except RankError as error:
            if "allocate memory" not in str(error):
                raise
            return blocks - 1
    raise AssertionError(f"one rank trains {MANY - 1} blocks within {LIMIT:,} bytes")


@pytest.mark.exhaustive
def test_four_ranks_train_three_times_what_one_can(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path)
    largest = largest_alone(corpus)
    blocks = next(n for n in range(largest, 200) if state_bytes(n) >= 3 * state_bytes(largest))
    config = config_of(corpus, blocks, 4, global_size=4, schedule={"name": "modular", "chunks": blocks + 2})
    config.zero = ZeroConfig(stage=3)
    ranks = run_mesh({"data": 4}, trained, config, timeout=600.0)
    (expected,) = run_mesh({}, train, config_of(corpus, blocks, 1, global_size=4), timeout=600.0)
    for losses in ranks:
        assert losses == pytest.approx(expected, rel=1e-4)
