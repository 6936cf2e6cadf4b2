"""Fixtures of the tests of layouts: corpora, configurations, and the runs of one process that they compare with."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.run import PretrainConfig
from tests.distributed.layout_cases import BERT_MODELS, GPT_MODELS, ONE, WIDE, Case, Groups
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import GPT2_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

Make = Callable[..., PretrainConfig]
Oracle = Callable[[Case, int], RankRun]
Corpora = tuple[str, BertDataConfig]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], BertDataConfig]:
    """A corpus of GPTs for each size of vocabulary, and one of BERTs."""
    shards = {
        size: write_shard(tmp_path_factory.mktemp(str(size)), vocabulary=size)
        for size in (GPT2_SHAPE.vocabulary_size, WIDE)
    }
    return shards, write_corpus(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def make(corpora: tuple[dict[int, str], BertDataConfig]) -> Make:
    """Return a function that makes the configuration of a model on a mesh."""
    shards, bert = corpora

    def configuration(name: str, sizes: dict[str, int], *changes: Groups) -> PretrainConfig:
        groups: Groups = {"parallel": dict(sizes)}
        for change in changes:
            groups = groups | {group: {**groups.get(group, {}), **fields} for group, fields in change.items()}
        if name in GPT_MODELS:
            model = GPT_MODELS[name]
            return make_config(shards[model.vocabulary_size], model, **groups)
        masked: BertModelConfig = BERT_MODELS[name]
        data = replace(bert, **({} if masked.sentence_head else {"pairs": "none"}), **groups.pop("data", {}))
        return make_bert_config(data, masked, **groups)

    return configuration


@pytest.fixture(scope="session")
def one_process(make: Make) -> Oracle:
    """Return a function that trains a case on one rank without the options of its layout; each is trained once."""
    runs: dict[tuple[str, str, int], RankRun] = {}

    def trained(case: Case, steps: int) -> RankRun:
        key = case.model, repr(case.run), steps
        if key not in runs:
            (runs[key],) = run_mesh(ONE, run_gpt, make(case.model, ONE, case.run), steps, backend="threads")
        return runs[key]

    return trained


@pytest.fixture(scope="session")
def small_corpora(corpora: tuple[dict[int, str], BertDataConfig]) -> Corpora:
    """Return the prefix of the small GPT corpus, and the BERT corpus."""
    return corpora[0][GPT2_SHAPE.vocabulary_size], corpora[1]


@pytest.fixture(scope="session")
def corpus(corpora: tuple[dict[int, str], BertDataConfig]) -> str:
    """Return the prefix of the small GPT corpus."""
    return corpora[0][GPT2_SHAPE.vocabulary_size]
