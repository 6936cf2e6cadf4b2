"""Runs whose heads compute their logits again in the backward: against one process, and against what is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.run import PretrainConfig
from tests.support.bert_runs import POST_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

STEPS = 4

Make = Callable[..., PretrainConfig]


@pytest.fixture(scope="module", params=["gpt", "bert"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of one family, tied embeddings, micro-batches of two samples."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus: Any = write_shard(folder) if request.param == "gpt" else write_corpus(folder)

    def configuration(sizes: dict[str, int], recompute: bool, **schedule: object) -> PretrainConfig:
        groups: dict[str, Any] = {
            "batch": {"global_size": 8, "micro_size": 2},
            "parallel": {name: sizes.get(name, 1) for name in ("pipeline", "tensor")},
            "recompute": {"logits": recompute},
            "schedule": schedule,
        }
        if request.param == "gpt":
            return make_config(corpus, GPT2_SHAPE, **groups)
        return make_bert_config(corpus, POST_NORM, **groups)

    return configuration


@pytest.fixture(scope="module")
def one_process(make: Make) -> RankRun:
    return run_mesh({}, run_gpt, make({}, True), STEPS)[0]


def test_one_process_follows_the_one_that_keeps(make: Make, one_process: RankRun) -> None:
    [kept] = run_mesh({}, run_gpt, make({}, False), STEPS)
    check_close([one_process], kept, first_loss=1e-6)


def test_a_pipeline_has_the_bits_of_one_process(make: Make, one_process: RankRun) -> None:
    sizes = {"pipeline": 2}
    check_bits(run_mesh(sizes, run_gpt, make(sizes, True, name="gpipe"), STEPS), one_process)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_tensor_ranks_follow_one_process(make: Make, one_process: RankRun, sizes: dict[str, int]) -> None:
    check_close(run_mesh(sizes, run_gpt, make(sizes, True), STEPS), one_process, first_loss=1e-5)


def test_bf16_follows_fp32(make: Make, one_process: RankRun) -> None:
    config = make({}, True)
    config.training = replace(config.training, precision="bf16")
    losses = [result.loss for result in run_mesh({}, run_gpt, config, STEPS)[0].results]
    assert losses == pytest.approx([result.loss for result in one_process.results], rel=2e-2)
