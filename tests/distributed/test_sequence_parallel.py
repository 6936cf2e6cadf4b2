"""Sequence parallelism trains the model of one process, on every schedule and beside every other saver of memory.

The oracle is one process, within the tolerances of tensor parallelism.
"""

from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.config.run import PretrainConfig
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

DROPOUT = {"embedding_dropout": 0.1, "hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "gpt2-tied-dropout": replace(GPT2_SHAPE, **DROPOUT),
    "gpt2-untied": replace(GPT2_SHAPE, tie_embeddings=False),
    "llama": LLAMA_SHAPE,
    "llama-4-kv-heads": replace(LLAMA_SHAPE, num_kv_heads=4),
    "qwen3": replace(LLAMA_SHAPE, qk_norm=True, tie_embeddings=True),
    "bert-post": POST_NORM,
    "bert-pre-dropout": PRE_NORM,
    "bert-rotary-untied": replace(POST_NORM, sentence_head=False, tie_embeddings=False, positions="rotary"),
}
STEPS = 4
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, BertDataConfig]:
    return write_shard(tmp_path_factory.mktemp("gpt")), write_corpus(tmp_path_factory.mktemp("bert"))


def config_of(
    corpora: tuple[str, BertDataConfig], model: str, sizes: dict[str, int], **groups: dict[str, Any]
) -> PretrainConfig:
    """A run over these sizes, on shards of the tokens where they are several tensor ranks."""
    sequence = {"sequence": True} if sizes.get("tensor", 1) > 1 else {}
    groups["parallel"] = {**sizes, **sequence, **groups.get("parallel", {})}
    groups = {"batch": {"micro_size": 2}, **groups}
    if not model.startswith("bert"):
        return make_config(corpora[0], MODELS[model], **groups)
    bert = MODELS[model]
    data = corpora[1] if bert.sentence_head else replace(corpora[1], pairs="none")  # type: ignore[attr-defined]
    return make_bert_config(data, bert, **groups)  # type: ignore[arg-type]


RUNS: dict[str, RankRun] = {}


def one_process(corpora: tuple[str, BertDataConfig], model: str) -> RankRun:
    if model not in RUNS:
        (RUNS[model],) = run_mesh({}, run_gpt, config_of(corpora, model, {}), STEPS)
    return RUNS[model]


def check_run(ranks: list[RankRun], expected: RankRun) -> None:
    """Also norms of gradients, and weights: AdamW magnifies what is left of a gradient that is nearly zero."""
    check_close(ranks, expected, 1e-5)
    norms, wanted = ([result.gradient_norm for result in run.results] for run in (ranks[0], expected))
    assert norms == pytest.approx(wanted, rel=1e-4)
    found, weights = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    for name, weight in weights.items():
        assert (found[name] - weight).norm() <= 5e-4 * weight.norm(), name


@pytest.mark.parametrize(
    ("model", "sizes", "chunks"),
    [
        ("gpt2-tied-dropout", {"tensor": 2}, 1),
        ("llama", {"tensor": 2, "pipeline": 2}, 2),
        ("bert-post", {"tensor": 4}, 3),
        pytest.param("gpt2-tied-dropout", {"tensor": 4}, 2, marks=EXHAUSTIVE),
        pytest.param("bert-pre-dropout", {"tensor": 2}, 1, marks=EXHAUSTIVE),
        pytest.param("gpt2-untied", {"tensor": 2, "pipeline": 2}, 4, marks=EXHAUSTIVE),
        pytest.param("gpt2-tied-dropout", {"tensor": 2, "data": 2}, 1, marks=EXHAUSTIVE),
        pytest.param("llama-4-kv-heads", {"tensor": 4}, 1, marks=EXHAUSTIVE),
        pytest.param("qwen3", {"tensor": 2}, 1, marks=EXHAUSTIVE),
        pytest.param("qwen3", {"tensor": 2, "pipeline": 2}, 1, marks=EXHAUSTIVE),
        pytest.param("bert-post", {"tensor": 2, "pipeline": 2}, 1, marks=EXHAUSTIVE),
        pytest.param("bert-pre-dropout", {"tensor": 2, "data": 2}, 2, marks=EXHAUSTIVE),
        pytest.param("bert-rotary-untied", {"tensor": 2}, 1, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_layouts_train_the_model_of_one_process(
    corpora: tuple[str, BertDataConfig], model: str, sizes: dict[str, int], chunks: int
) -> None:
    config = config_of(corpora, model, sizes, parallel={"sequence_chunks": chunks})
    check_run(run_mesh(sizes, run_gpt, config, STEPS), one_process(corpora, model))


@pytest.mark.parametrize(
    ("model", "schedule", "recompute"),
    [
        ("llama", {"name": "zb_h1"}, {"method": "selective"}),
        pytest.param("gpt2-tied-dropout", {"name": "zb_v"}, {}, marks=EXHAUSTIVE),
        pytest.param("llama", {"name": "1f1b"}, {"method": "full", "logits": True}, marks=EXHAUSTIVE),
        pytest.param("bert-pre-dropout", {"name": "zb_h1"}, {}, marks=EXHAUSTIVE),
        pytest.param("gpt2-tied-dropout", {"name": "gpipe"}, {"method": "selective"}, marks=EXHAUSTIVE),
        pytest.param("gpt2-tied-dropout", {"name": "interleaved_1f1b"}, {"method": "full"}, marks=EXHAUSTIVE),
        pytest.param("llama", {"name": "modular"}, {}, marks=EXHAUSTIVE),
        pytest.param("llama", {"name": "zb_h2"}, {"method": "full"}, marks=EXHAUSTIVE),
        pytest.param("qwen3", {"name": "zb_auto"}, {}, marks=EXHAUSTIVE),
        pytest.param("qwen3", {"name": "1f1b", "two_bp": True}, {"method": "selective"}, marks=EXHAUSTIVE),
        pytest.param("bert-post", {"name": "1f1b"}, {"method": "full", "logits": True}, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_schedules_and_recomputation(
    corpora: tuple[str, BertDataConfig], model: str, schedule: dict[str, Any], recompute: dict[str, Any]
) -> None:
    sizes = {"tensor": 2, "pipeline": 2}
    config = config_of(corpora, model, sizes, schedule=schedule, recompute=recompute)
    check_run(run_mesh(sizes, run_gpt, config, STEPS), one_process(corpora, model))
