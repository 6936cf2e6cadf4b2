"""Every layout and schedule trains the same BERT, and a checkpoint of one goes on on another.

As for GPT the oracle is one process: bit for bit where no sum is reordered, within the design's tolerances elsewhere.
Masked tokens and sentence pairs are two terms of the loss, each a mean over the global batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.engine.step import StepInput
from megapipe.optim.learning_rate import learning_rate
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import GENERATORS
from megapipe.training.evaluation import Evaluator
from megapipe.training.families import family_of
from megapipe.training.records import EvaluationRecord
from megapipe.training.replica import Replica
from megapipe.training.sources import open_loader, open_samples
from tests.checkpoint.runs import assert_same_bits
from tests.checkpoint.runs import run as run_saving
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import RankRun, assembled, run_gpt, shards
from tests.support.meshes import run_mesh, run_threads

MODELS = {
    "post-norm": POST_NORM,
    "pre-norm-dropout": PRE_NORM,
    "masked-tokens-alone": replace(POST_NORM, sentence_head=False, tie_embeddings=False, positions="rotary"),
}
STEPS = 6
FLUSHING = [name for name, generator in GENERATORS.items() if generator.numerical_class == "A"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> BertDataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def config_of(
    corpus: BertDataConfig, model: BertModelConfig, sizes: dict[str, int], **groups: Any
) -> BertPretrainConfig:
    data = corpus if model.sentence_head else replace(corpus, pairs="none")
    config = make_bert_config(data, model, **groups)
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config.parallel = replace(config.parallel, **layout)
    return config


@cache
def one_process(prefix: str, name: str) -> RankRun:
    return run_mesh({}, run_gpt, config_of(CORPORA[prefix], MODELS[name], {}), STEPS)[0]


CORPORA: dict[str, BertDataConfig] = {}


def expected_run(corpus: BertDataConfig, name: str) -> RankRun:
    CORPORA[corpus.prefix] = corpus
    return one_process(corpus.prefix, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"pipeline": 4}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_equal_one_process_bit_for_bit(corpus: BertDataConfig, model: str, sizes: dict[str, int]) -> None:
    ranks = run_mesh(sizes, run_gpt, config_of(corpus, MODELS[model], sizes), STEPS)
    check_bits(ranks, expected_run(corpus, model))
    terms = [result.loss_terms for result in ranks[0].results]
    assert terms == [result.loss_terms for result in expected_run(corpus, model).results]
    assert {len(each) for each in terms} == {1 if model == "masked-tokens-alone" else 2}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_reordered_sums_stay_within_tolerance(corpus: BertDataConfig, model: str, sizes: dict[str, int]) -> None:
    ranks = run_mesh(sizes, run_gpt, config_of(corpus, MODELS[model], sizes), STEPS)
    check_close(ranks, expected_run(corpus, model), first_loss=1e-5 if "tensor" in sizes else 1e-6)


@pytest.mark.parametrize("schedule", FLUSHING)
def test_flushing_schedules_equal_one_process_bit_for_bit(corpus: BertDataConfig, schedule: str) -> None:
    model = replace(POST_NORM, num_layers=4)
    config = config_of(corpus, model, {})
    one_thread = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (expected,) = run_threads({}, run_gpt, config, 3)
        split = config_of(corpus, model, {"pipeline": 2}, schedule={"name": schedule})
        check_bits(run_threads({"pipeline": 2}, run_gpt, split, 3), expected)
    finally:
        torch.set_num_threads(one_thread)


def test_terms_are_means_over_the_global_batch(corpus: BertDataConfig) -> None:
    """Micro-batches hold unequal numbers of masked tokens, so a mean of their means would be another number."""
    config = config_of(corpus, POST_NORM, {})
    whole = replace(config, batch=replace(config.batch, micro_size=8))
    (one,), (other,) = (run_mesh({}, run_gpt, each, 1) for each in (config, whole))
    assert one.results[0].loss_terms == pytest.approx(other.results[0].loss_terms, rel=1e-6)
    assert one.results[0].token_count == other.results[0].token_count
    assert one.results[0].loss == sum(one.results[0].loss_terms)
    for name, gradient in assembled([other.gradients]).items():
        difference = (assembled([one.gradients])[name] - gradient).norm()
        assert difference <= 1e-5 * max(gradient.norm(), torch.tensor(0.01)), name


class Held:
    """An optimizer that keeps what it is given and leaves the weights alone."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.coefficient = torch.zeros(())

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        self.gradients |= {state.name: state.gradients[0].clone() for state in states}
        self.coefficient = coefficient
        for state in states:
            state.begin_update(version)


def recursion(mesh: Mesh, config: BertPretrainConfig) -> RankRun:
    """2BW's recursion W(t+1) = W(t) - lr * g(W(t-1)) by hand: `older` finds gradients, `newest` is stepped by them."""
    config = replace(config, schedule=replace(config.schedule, name="1f1b"))
    layers = family_of(config).layers
    older, newest = (Replica(config, mesh, layers) for _ in range(2))
    held = Held()
    older.optimizer = held  # type: ignore[assignment]
    older.engine = older.engine_for(config.batch.global_size)
    loader = open_loader(config, mesh, older, open_samples(config, "train"))
    weights = [[state.master.clone() for state in newest.states()]] * 2
    results = []
    for step in range(STEPS):
        for state, values in zip(older.states(), weights[step], strict=True):
            state.master.copy_(values)
        batch = loader.load(step * config.batch.global_size)
        rate = learning_rate(config.optimizer, step + 1, config.training.steps)
        results.append(older.engine.run(StepInput(step, batch.contexts, batch.token_counts, rate)))
        for state in newest.states():
            state.gradients[0].copy_(held.gradients[state.name])
        newest.optimizer.update(newest.states(), newest.states()[0].newest + 1, rate, held.coefficient)
        weights.append([state.master.clone() for state in newest.states()])
    states = newest.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


def fed(mesh: Mesh, config: BertPretrainConfig) -> RankRun:
    """A rank's run of a schedule that never flushes."""
    parallel = replace(config.parallel, data=mesh.size("data"), timeout_seconds=30.0)
    config = replace(config, parallel=parallel)
    replica = Replica(config, mesh, family_of(config).layers)
    loader = open_loader(config, mesh, replica, open_samples(config, "train"))
    results = []
    for step in range(STEPS):
        batch = loader.load(step * config.batch.global_size)
        rate = learning_rate(config.optimizer, step + 1, config.training.steps)
        results += replica.engine.feed(StepInput(step, batch.contexts, batch.token_counts, rate))
    results += replica.engine.drain()
    states = replica.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_2bw_is_its_recursion(corpus: BertDataConfig, pipeline: int) -> None:
    config = config_of(corpus, PRE_NORM, {"pipeline": pipeline}, schedule={"name": "2bw"})
    (expected,) = run_mesh({}, recursion, config_of(corpus, PRE_NORM, {}))
    ranks = run_mesh({"pipeline": pipeline}, fed, config)
    for rank in ranks:
        assert [(r.loss_terms, r.gradient_norm) for r in rank.results] == [
            (r.loss_terms, r.gradient_norm) for r in expected.results
        ]
    found, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def saving_config(folder: Path, corpus: BertDataConfig, **groups: Any) -> BertPretrainConfig:
    config = config_of(corpus, PRE_NORM, {}, checkpoint={"every": 3}, **groups)
    config.training = replace(config.training, directory=str(folder))
    return config


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_three_steps_and_three_more_on_another_pipeline_are_six(
    tmp_path: Path, corpus: BertDataConfig, schedule: str
) -> None:
    def configured(name: str, **checkpoint: Any) -> BertPretrainConfig:
        config = saving_config(tmp_path / name, corpus, schedule={"name": schedule})
        return replace(config, checkpoint=replace(config.checkpoint, **checkpoint))

    whole = run_saving({"pipeline": 2}, configured("whole", every=None), 6)
    run_saving({"pipeline": 2}, configured("parts"), 3)
    again = run_saving({"pipeline": 4}, configured("parts"), 6)
    assert again.start == 3
    assert_same_bits(again, whole)


def test_other_masks_are_another_run(tmp_path: Path, corpus: BertDataConfig) -> None:
    run_saving({}, saving_config(tmp_path, corpus), 3)
    with pytest.raises(Exception, match=r"data\.mask_probability is 0\.3 and was 0\.15"):
        run_saving({}, saving_config(tmp_path, replace(corpus, mask_probability=0.3)), 6)


def evaluated(mesh: Mesh, config: BertPretrainConfig) -> EvaluationRecord:
    replica = Replica(config, mesh, family_of(config).layers)
    return Evaluator(config, mesh, replica, open_samples(config, "validation")).run(3)


@pytest.mark.slow
def test_every_layout_evaluates_alike(corpus: BertDataConfig) -> None:
    def config(sizes: dict[str, int]) -> BertPretrainConfig:
        return config_of(corpus, PRE_NORM, sizes, evaluation={"every": 1, "samples": 20})

    (expected,) = run_mesh({}, evaluated, config({}))
    assert set(expected.terms) == set(expected.accuracies) == {"mlm", "sop"}
    assert expected.loss == sum(expected.terms.values())
    assert 0 < expected.accuracies["sop"] < 1
    for sizes, tolerance in (({"pipeline": 2}, 0.0), ({"data": 2}, 0.0), ({"tensor": 2}, 1e-6)):
        for record in run_mesh(sizes, evaluated, config(sizes)):
            assert record.loss_tokens == expected.loss_tokens
            assert record.terms == pytest.approx(expected.terms, rel=tolerance, abs=0.0)
            assert record.accuracies == expected.accuracies


def test_only_ends_of_a_pipeline_read_tokens(corpus: BertDataConfig) -> None:
    for rank, fields in enumerate(
        run_mesh({"pipeline": 4}, filled_fields, config_of(corpus, POST_NORM, {"pipeline": 4}))
    ):
        assert ("tokens" in fields) == (rank == 0)
        assert ("labels" in fields) == (rank == 3)
        assert {"lengths", "ordinals"} <= fields


def filled_fields(mesh: Mesh, config: BertPretrainConfig) -> set[str]:
    replica = Replica(config, mesh, family_of(config).layers)
    contexts = open_loader(config, mesh, replica, open_samples(config, "train")).load(0).contexts
    names = [{name for name, value in vars(context).items() if value is not None} for context in contexts]
    assert all(one == other for one, other in itertools.pairwise(names))
    return names[0]
