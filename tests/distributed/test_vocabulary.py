"""An output layer that all pipeline ranks share trains and evaluates what one process does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.training.validation import validate
from tests.distributed.test_slices import evaluated
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh, run_threads

DROPPING = replace(GPT2_SHAPE, tie_embeddings=False, embedding_dropout=0.1, hidden_dropout=0.1)
SCALED = replace(LLAMA_SHAPE, tie_embeddings=False, logit_scale=0.7, logit_softcap=3.0)


def configurations(
    folder: Path, model: ModelConfig, sizes: dict[str, int], **groups: dict[str, Any]
) -> tuple[PretrainConfig, PretrainConfig]:
    """A run of one process, and one whose pipeline ranks share the output layer."""
    prefix = write_shard(folder)
    groups["parallel"] = {**sizes, "vocabulary": "pipeline"}
    return make_config(prefix, model), make_config(prefix, model, **groups)


@pytest.mark.parametrize(
    ("model", "sizes", "groups"),
    [
        (DROPPING, {"pipeline": 2}, {}),
        (SCALED, {"pipeline": 4}, {"schedule": {"name": "zb_h1"}}),
        (SCALED, {"pipeline": 2, "tensor": 2}, {"schedule": {"name": "zb_v"}}),
        (DROPPING, {"pipeline": 2, "data": 2}, {"zero": {"stage": 3}}),
        (DROPPING, {"pipeline": 2, "context": 2}, {"schedule": {"name": "interleaved_1f1b"}}),
    ],
)
def test_shards_of_the_vocabulary_train_as_one_process(
    tmp_path: Path, model: ModelConfig, sizes: dict[str, int], groups: dict[str, dict[str, Any]]
) -> None:
    whole, config = configurations(tmp_path, model, sizes, **groups)
    size = 1
    for each in sizes.values():
        size *= each
    validate(config, size)
    (oracle,) = run_threads({}, run_gpt, whole, 2)
    check_close(run_mesh(sizes, run_gpt, config, 2), oracle, first_loss=5e-6)


def test_an_evaluation_with_shards_has_the_loss_of_one_process(tmp_path: Path) -> None:
    whole, config = configurations(tmp_path, SCALED, {"pipeline": 2})
    (expected,) = run_threads({}, evaluated, whole)
    assert run_threads({"pipeline": 2}, evaluated, config) == pytest.approx([expected] * 2, rel=1e-6)
