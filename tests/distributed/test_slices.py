"""Samples that pass a pipeline in slices train what whole samples train, and are evaluated as these are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.in_process import InProcessMesh
from megapipe.training.loop.batches import open_samples
from megapipe.training.loop.replica import Replica
from megapipe.training.loop.steps import Evaluator
from megapipe.training.validation import validate
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config, run_gpt, write_shard
from tests.support.meshes import run_threads

DROPPING = replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
INTERLEAVED, FLOPS = {"slices": 4, "chunks": 2}, {"slices": 3, "slice_split": "flops"}


def configuration(folder: Path, model: ModelConfig, **groups: dict[str, Any]) -> PretrainConfig:
    """Samples of 64 tokens."""
    groups["data"] = {"sequence_length": 64, **groups.get("data", {})}
    return make_config(write_shard(folder), replace(model, max_positions=64), **groups)


@pytest.mark.parametrize(
    ("model", "sizes", "slices", "groups"),
    [
        (DROPPING, {"pipeline": 2}, FLOPS, {}),
        pytest.param(replace(LLAMA_SHAPE, num_layers=4), {"pipeline": 2}, INTERLEAVED, {}, marks=pytest.mark.slow),
        pytest.param(
            replace(LLAMA_SHAPE, sliding_window=9), {"tensor": 2, "pipeline": 2}, FLOPS,
            {"data": {"isolate_documents": True}, "parallel": {"sequence": True}},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_slices_train_what_whole_samples_train(
    tmp_path: Path, model: ModelConfig, sizes: dict[str, int], slices: dict[str, Any], groups: dict[str, Any]
) -> None:
    whole = configuration(tmp_path, model, **{name: each for name, each in groups.items() if name == "data"})
    parallel = {**sizes, **groups.get("parallel", {})}
    config = configuration(
        tmp_path, model, **{**groups, "parallel": parallel, "schedule": {"name": "seq1f1b", **slices}}
    )
    validate(config, 2 if len(sizes) == 1 and sizes["pipeline"] == 2 else 4)
    (oracle,) = run_threads({}, run_gpt, whole, 2)
    check_close(run_threads(sizes, run_gpt, config, 2), oracle, first_loss=5e-6)


def evaluated(mesh: InProcessMesh, config: PretrainConfig) -> float:
    replica = Replica(config, mesh)
    record = Evaluator(config, mesh, replica, open_samples(config, "validation")).run(0)
    assert record is not None
    return record.loss


def test_evaluation_in_slices_has_the_loss_of_whole_samples(tmp_path: Path) -> None:
    whole = configuration(tmp_path, DROPPING)
    config = configuration(tmp_path, DROPPING, parallel={"pipeline": 2}, schedule={"name": "seq1f1b", **FLOPS})
    (expected,) = run_threads({}, evaluated, whole)
    assert run_threads({"pipeline": 2}, evaluated, config) == pytest.approx([expected] * 2, rel=1e-6)
