"""Samples that several ranks share train the same model: losses, gradients and weights against one process."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

MODELS = {
    "gpt2": replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1),
    "gpt2-attention-dropout": replace(GPT2_SHAPE, hidden_dropout=0.1, attention_dropout=0.1),
    "llama": LLAMA_SHAPE,
    "llama-window": replace(LLAMA_SHAPE, sliding_window=5),
}
BERTS = {
    "post-norm": POST_NORM,
    "pre-norm-dropout": PRE_NORM,
    "masked-tokens-alone": replace(POST_NORM, sentence_head=False, tie_embeddings=False, positions="rotary"),
}
STEPS = 4
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> BertDataConfig:
    return write_corpus(tmp_path_factory.mktemp("sentences"))


def config_of(
    corpus: str, model: ModelConfig, sizes: dict[str, int], kind: str = "ring", documents: bool = False, **groups: Any
) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "context", "tensor")}
    config = make_config(corpus, model, parallel={**layout, "context_attention": kind}, **groups)
    return replace(config, data=replace(config.data, isolate_documents=documents))


@cache
def one_process(corpus: str, model: str, documents: bool = False) -> RankRun:
    return run_mesh({}, run_gpt, config_of(corpus, MODELS[model], {}, documents=documents), STEPS)[0]


FAST = [
    ("llama", {"context": 2, "tensor": 2}, "ring", True),
]
MORE = [
    ("gpt2", {"context": 2}, "ring", False),
    ("llama", {"context": 2, "pipeline": 2}, "all_to_all", True),
    ("gpt2", {"context": 2}, "ring", True),
    ("gpt2", {"context": 2}, "all_to_all", False),
    ("gpt2", {"context": 4}, "ring", False),
    ("gpt2", {"context": 4}, "ring", True),
    ("gpt2", {"context": 4}, "all_to_all", True),
    ("gpt2", {"context": 2, "pipeline": 2}, "ring", False),
    ("gpt2", {"context": 2, "pipeline": 2}, "all_to_all", False),
    ("gpt2", {"context": 2, "data": 2}, "ring", True),
    ("gpt2", {"context": 2, "data": 2}, "all_to_all", False),
    ("gpt2-attention-dropout", {"context": 2, "tensor": 2}, "ring", False),
    ("gpt2-attention-dropout", {"context": 2, "tensor": 2}, "ring", True),
    ("gpt2-attention-dropout", {"context": 2, "tensor": 2}, "all_to_all", False),
    ("llama", {"context": 2, "tensor": 2}, "ring", False),
    ("llama", {"context": 2, "tensor": 2}, "all_to_all", True),
    ("llama", {"context": 4}, "ring", False),
    ("llama", {"context": 4}, "ring", True),
    ("llama", {"context": 4}, "all_to_all", False),
    ("llama", {"context": 2, "pipeline": 2}, "ring", True),
    ("llama-window", {"context": 2}, "ring", False),
    ("llama-window", {"context": 2}, "ring", True),
    ("llama-window", {"context": 2}, "all_to_all", False),
]


@pytest.mark.parametrize(
    ("model", "sizes", "kind", "documents"),
    [*FAST, *(pytest.param(*each, marks=EXHAUSTIVE) for each in MORE)],
    ids=str,
)
def test_gpt_trains_as_in_one_process(
    corpus: str, model: str, sizes: dict[str, int], kind: str, documents: bool
) -> None:
    ranks = run_mesh(sizes, run_gpt, config_of(corpus, MODELS[model], sizes, kind, documents), STEPS)
    check_close(ranks, one_process(corpus, model, documents), first_loss=1e-5)


def bert_config(
    sentences: BertDataConfig, model: str, sizes: dict[str, int], kind: str = "ring", **groups: Any
) -> Any:
    data = sentences if BERTS[model].sentence_head else replace(sentences, pairs="none")
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "context", "tensor")}
    return make_bert_config(data, BERTS[model], parallel={**layout, "context_attention": kind}, **groups)


@pytest.mark.parametrize(
    ("model", "sizes", "kind"),
    [
        ("post-norm", {"context": 2}, "ring"),
        pytest.param("pre-norm-dropout", {"context": 2, "pipeline": 2}, "all_to_all", marks=EXHAUSTIVE),
        pytest.param("post-norm", {"context": 2}, "all_to_all", marks=EXHAUSTIVE),
        pytest.param("pre-norm-dropout", {"context": 4}, "ring", marks=EXHAUSTIVE),
        pytest.param("pre-norm-dropout", {"context": 4}, "all_to_all", marks=EXHAUSTIVE),
        pytest.param("pre-norm-dropout", {"context": 2, "pipeline": 2}, "ring", marks=EXHAUSTIVE),
        pytest.param("post-norm", {"context": 2, "tensor": 2}, "ring", marks=EXHAUSTIVE),
        pytest.param("masked-tokens-alone", {"context": 2, "data": 2}, "ring", marks=EXHAUSTIVE),
        pytest.param("masked-tokens-alone", {"context": 2, "data": 2}, "all_to_all", marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_bert_trains_as_in_one_process(
    sentences: BertDataConfig, model: str, sizes: dict[str, int], kind: str
) -> None:
    (expected,) = run_mesh({}, run_gpt, bert_config(sentences, model, {}), STEPS)
    ranks = run_mesh(sizes, run_gpt, bert_config(sentences, model, sizes, kind), STEPS)
    check_close(ranks, expected, first_loss=1e-5)
    for rank in ranks:
        assert [result.token_count for result in rank.results] == [result.token_count for result in expected.results]
        for found, wanted in zip(rank.results, expected.results, strict=True):
            assert found.loss_terms == pytest.approx(wanted.loss_terms, rel=1e-4)
