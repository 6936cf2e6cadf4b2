"""Shared samples under every kind of schedule, with recomputation, compiled, evaluated, saved and resumed."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertDataConfig, BertPretrainConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training import assemble
from megapipe.training.assemble import CompiledForward
from megapipe.training.evaluation import Evaluator
from megapipe.training.families import family_of
from megapipe.training.records import EvaluationRecord
from megapipe.training.replica import Replica
from megapipe.training.sources import open_samples
from tests.checkpoint.runs import run as run_saving
from tests.distributed.test_context_parallel import STEPS, bert_config, config_of
from tests.distributed.test_never_flushing import trained
from tests.support.bert_runs import write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, run_gpt, write_shard
from tests.support.meshes import run_mesh

DEEP = replace(GPT2_SHAPE, num_layers=4, hidden_dropout=0.1)
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> BertDataConfig:
    return write_corpus(tmp_path_factory.mktemp("sentences"))


@cache
def one_process(corpus: str) -> RankRun:
    return run_mesh({}, run_gpt, config_of(corpus, DEEP, {}), STEPS)[0]


SPLIT = [{"name": "zb_h1"}, {"name": "zb_v"}, {"name": "interleaved_1f1b", "two_bp": True}]


@pytest.mark.parametrize("kind", ["ring", pytest.param("all_to_all", marks=EXHAUSTIVE)])
@pytest.mark.parametrize(
    "schedule",
    [SPLIT[0], *(pytest.param(each, marks=EXHAUSTIVE) for each in (*SPLIT[1:], {"name": "modular"}))],
    ids=str,
)
def test_schedules_and_split_backwards(corpus: str, schedule: dict[str, Any], kind: str) -> None:
    sizes = {"context": 2, "pipeline": 2}
    config = config_of(corpus, DEEP, sizes, kind, schedule=schedule)
    ranks = run_mesh(sizes, run_gpt, config, STEPS)
    check_close(ranks, one_process(corpus), first_loss=1e-5)


@pytest.mark.parametrize(
    ("recompute", "kind"),
    [
        ({"method": "full"}, "ring"),
        pytest.param({"method": "full"}, "all_to_all", marks=EXHAUSTIVE),
        pytest.param({"method": "selective"}, "ring", marks=EXHAUSTIVE),
        pytest.param({"method": "selective"}, "all_to_all", marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_what_runs_again_changes_no_bit(corpus: str, recompute: dict[str, Any], kind: str) -> None:
    sizes = {"context": 2}
    model = replace(DEEP, attention_dropout=0.1)
    plain = config_of(corpus, model, sizes, kind)
    kept = run_mesh(sizes, run_gpt, plain, 2)
    found = run_mesh(sizes, run_gpt, replace(plain, recompute=RecomputeConfig(**recompute)), 2)
    for one, other in zip(found, kept, strict=True):
        check_bits([one], other)


@EXHAUSTIVE
def test_a_schedule_that_never_flushes_and_shares_samples(corpus: str) -> None:
    (expected,) = run_mesh({}, trained, config_of(corpus, GPT2_SHAPE, {}, schedule={"name": "2bw"}), (), False)
    config = config_of(corpus, GPT2_SHAPE, {"context": 2, "pipeline": 2}, schedule={"name": "2bw"})
    for rank in run_mesh({"context": 2, "pipeline": 2}, trained, config, (), False):
        losses = [result.loss for result in rank.results]
        assert losses == pytest.approx([result.loss for result in expected.results], rel=1e-4)


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_compiled_blocks_share_samples(corpus: str, kind: str) -> None:
    sizes = {"context": 2}
    model = replace(LLAMA_SHAPE, hidden_dropout=0.1)
    plain = config_of(corpus, model, sizes, kind, documents=True)
    expected = run_mesh(sizes, run_gpt, plain, 2)
    # In halves, so that the compiled forward takes probes too.
    config = replace(plain, training=replace(plain.training, compile=True))
    config = replace(config, schedule=replace(plain.schedule, two_bp=True))
    for found, wanted in zip(run_mesh(sizes, traced, config, timeout=300), expected, strict=True):
        check_close([found], wanted, first_loss=1e-5)


def traced(mesh: Mesh, config: PretrainConfig) -> RankRun:
    assemble.CompiledForward = lambda **options: CompiledForward(backend="aot_eager", **options)  # type: ignore
    return run_gpt(mesh, config, 2, timeout=200.0)


def evaluated(mesh: Mesh, config: PretrainConfig) -> EvaluationRecord:
    replica = Replica(config, mesh, family_of(config).layers)
    return Evaluator(config, mesh, replica, open_samples(config, "validation")).run(3)


@pytest.mark.parametrize("kind", ["ring", pytest.param("all_to_all", marks=EXHAUSTIVE)])
def test_shared_samples_are_evaluated_alike(corpus: str, sentences: BertDataConfig, kind: str) -> None:
    sizes, rule = {"context": 2}, {"every": 1, "samples": 20}
    for plain, shared in (
        (
            config_of(corpus, LLAMA_SHAPE, {}, evaluation=rule),
            config_of(corpus, LLAMA_SHAPE, sizes, kind, evaluation=rule),
        ),
        (
            bert_config(sentences, "post-norm", {}, evaluation=rule),
            bert_config(sentences, "post-norm", sizes, kind, evaluation=rule),
        ),
    ):
        (expected,) = run_mesh({}, evaluated, plain)
        for record in run_mesh(sizes, evaluated, shared):
            assert record.loss_tokens == expected.loss_tokens
            assert record.loss == pytest.approx(expected.loss, rel=1e-6)
            assert record.terms == pytest.approx(expected.terms, rel=1e-6)
            assert record.accuracies == expected.accuracies
        assert bool(expected.accuracies) == isinstance(plain, BertPretrainConfig)


def test_a_run_goes_on_with_other_shares(tmp_path: Path, corpus: str) -> None:
    def configured(name: str, sizes: dict[str, int], kind: str = "ring") -> PretrainConfig:
        config = config_of(corpus, LLAMA_SHAPE, sizes, kind, checkpoint={"every": 2})
        return replace(config, training=replace(config.training, directory=str(tmp_path / name)))

    whole = run_saving({}, configured("whole", {}), 6)
    for sizes, until, kind in (({"context": 2}, 2, "ring"), ({"context": 4}, 4, "all_to_all"), ({}, 6, "ring")):
        parts = run_saving(sizes, configured("parts", sizes, kind), until)
        assert parts.start == until - 2
    assert [loss for _, loss in parts.losses] == pytest.approx([loss for _, loss in whole.losses], rel=1e-4)
    for name, tensor in whole.tensors["weights"].items():
        assert (parts.tensors["weights"][name] - tensor).norm() <= 1e-3 * tensor.norm(), name
