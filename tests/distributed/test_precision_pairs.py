"""Precisions and optimizers in pairs: one process's bits under a split backward, and learning under stale updates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.training.families import family_of
from megapipe.training.replica import Replica
from megapipe.training.sources import open_loader, open_samples
from tests.support.bert_runs import PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

pytestmark = pytest.mark.slow

MUON: dict[str, Any] = {"optimizer": {"name": "muon"}}
NO_MASTER: dict[str, Any] = {"training": {"precision": "bf16", "master_weights": False}}
PAIRS = {
    "fp16 and muon": {"training": {"precision": "fp16"}, **MUON},
    "fp16 and bf16 moments": {"training": {"precision": "fp16"}, "optimizer": {"moment_dtype": "bf16"}},
    "no master and fp8": {"training": {**NO_MASTER["training"], "fp8": "tensorwise"}},
    "no master and muon": {**NO_MASTER, **MUON},
    "fp8 and muon": {"training": {"fp8": "rowwise"}, **MUON},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_give_the_bits_of_one_process(corpus: str, pair: str) -> None:
    (expected,) = run_mesh({}, run_gpt, make_config(corpus, LLAMA_SHAPE, **PAIRS[pair]), 3)
    layout: dict[str, Any] = {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}}
    config = make_config(corpus, LLAMA_SHAPE, **PAIRS[pair], **layout)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, 3), expected)


@pytest.mark.parametrize(
    "groups",
    [{"training": {"precision": "fp16"}}, {"training": {"precision": "bf16", "fp8": "rowwise"}, **MUON}],
    ids=["fp16", "fp8-muon"],
)
def test_a_bert_does_too(tmp_path: Path, groups: dict[str, Any]) -> None:
    data = write_corpus(tmp_path)
    (expected,) = run_mesh({}, run_gpt, make_bert_config(data, PRE_NORM, **groups), 3)
    config = make_bert_config(data, PRE_NORM, parallel={"pipeline": 2}, **groups)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, 3), expected)


def fed(mesh: Mesh, config: PretrainConfig) -> list[float]:
    """Losses of ten steps of a schedule that never flushes."""
    config = replace(config, parallel=replace(config.parallel, data=1, timeout_seconds=30.0))
    replica = Replica(config, mesh, family_of(config).layers)
    loader = open_loader(config, mesh, replica, open_samples(config, "train"))
    results = []
    for step in range(10):
        batch = loader.load(0)
        results += replica.engine.feed(StepInput(step, batch.contexts, batch.token_counts, 2e-3))
    results += replica.engine.drain()
    return [result.loss for result in results]


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_stale_updates_learn_one_batch(corpus: str, schedule: str) -> None:
    for groups in (NO_MASTER, MUON):
        optimizer = {**groups.get("optimizer", {}), "clip_norm": None}
        layout: dict[str, Any] = {"parallel": {"pipeline": 2}, "schedule": {"name": schedule}, "optimizer": optimizer}
        config = make_config(corpus, LLAMA_SHAPE, **{**groups, **layout})
        first, second = run_mesh({"pipeline": 2}, fed, config)
        assert first == second
        assert first[-1] < first[0] - 0.2
