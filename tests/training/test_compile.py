"""`training.compile`: blocks through torch.compile on schedules of every kind, against the same run without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.compiled_runs import run_compiled
from tests.support.equality import check_bits, check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, write_shard
from tests.support.meshes import run_mesh

DROPOUT = replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def train(
    corpus: str, model: ModelConfig, *, compiler: str | None, pipeline: int = 1, schedule: dict[str, Any] | None = None
) -> list[RankRun]:
    """compiler: a backend of torch.compile, None for a run without."""
    config = make_config(
        corpus,
        model,
        parallel={"pipeline": pipeline},
        schedule=schedule or {},
        training={"compile": compiler is not None},
    )
    return run_mesh({"pipeline": pipeline}, run_compiled, config, compiler, STEPS, timeout=300)


def check(found: list[RankRun], expected: list[RankRun]) -> None:
    for run in found:
        assert [result.loss for result in run.results] == pytest.approx(
            [result.loss for result in expected[0].results], rel=1e-5
        )
    check_gradients(*(assembled([run.gradients for run in runs]) for runs in (found, expected)))


@pytest.mark.slow
def test_traced_blocks_train_the_same_model_whole_and_in_halves(corpus: str) -> None:
    """Three blocks in one stage, so that a tape holds the records of several."""
    model = replace(GPT2_SHAPE, num_layers=3)
    expected = train(corpus, model, compiler=None)
    whole = train(corpus, model, compiler="aot_eager")
    check(whole, expected)
    check_bits(train(corpus, model, compiler="aot_eager", schedule={"two_bp": True}), whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [POST_NORM, PRE_NORM], ids=["post", "pre-dropout"])
def test_traced_blocks_of_a_bert_train_the_same_model(tmp_path: Path, model: BertModelConfig) -> None:
    data = write_corpus(tmp_path)
    runs = []
    for compiler, schedule in ((None, {}), ("aot_eager", {}), ("aot_eager", {"two_bp": True})):
        config = make_bert_config(data, model, schedule=schedule, training={"compile": compiler is not None})
        runs.append(run_mesh({}, run_compiled, config, compiler, STEPS, timeout=300))
    expected, whole, halves = runs
    check(whole, expected)
    check_bits(halves, whole[0])


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA_SHAPE], ids=["dropout", "llama"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "2bw"])
def test_compiled_blocks_train_the_same_model(corpus: str, model: ModelConfig, schedule: str) -> None:
    expected = train(corpus, model, compiler=None, pipeline=2, schedule={"name": schedule})
    check(train(corpus, model, compiler="inductor", pipeline=2, schedule={"name": schedule}), expected)
