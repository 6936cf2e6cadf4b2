"""PipeDream-2BW and PipeDream train GPTs as their recursions say, on any pipeline, and resume as if never stopped.

The oracle of 2BW is its recursion W(t+1) = W(t) - lr * g(W(t-1)) (arXiv 2006.09503, section 3.1) by hand: one process
finds the gradient at the older weights with a schedule that flushes, and another steps the newer ones.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.config.zero import ZeroConfig
from megapipe.engine.step import StepInput, StepResult
from megapipe.optim.learning_rate import learning_rate
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.layers import model_layers
from megapipe.training.batches import batch_loader, split_samples
from megapipe.training.loader import StepBatch
from megapipe.training.replica import Replica
from tests.checkpoint.runs import Outcome, assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, shards, write_shard
from tests.support.meshes import run_mesh, run_threads

STEPS = 6
BOTH = {"pipeline": 2, "data": 2}
POISONED = 2
"""The step whose gradients are not finite, where one is to be skipped."""
MODELS = {
    "gpt2-tied-dropout": replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1),
    "llama-untied": LLAMA_SHAPE,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def batches(config: PretrainConfig, mesh: Mesh, replica: Replica, poisoned: bool) -> list[StepBatch]:
    """The first batches of a run; one of them has an infinite loss where it is poisoned."""
    loader = batch_loader(config, mesh, replica, split_samples(config, "train"))
    found = [loader.load(step * config.batch.global_size) for step in range(STEPS)]
    mask = found[POISONED].contexts[0].loss_mask
    if poisoned and mask is not None:
        mask.fill_(torch.inf)
    return found


def inputs(config: PretrainConfig, step: int, batch: StepBatch) -> StepInput:
    rate = learning_rate(config.optimizer, step + 1, config.training.steps)
    return StepInput(step, batch.contexts, batch.token_counts, rate)


def trained(mesh: Mesh, config: PretrainConfig, drained: tuple[int, ...], poisoned: bool) -> RankRun:
    """Feed all steps to a rank's engine, drained behind some of them and at the end."""
    parallel = replace(config.parallel, data=mesh.size("data"), pipeline=mesh.size("pipeline"), timeout_seconds=30.0)
    config = replace(config, parallel=replace(parallel, tensor=mesh.size("tensor")))
    replica = Replica(config, mesh, model_layers(config.model))
    results: list[StepResult] = []
    for step, batch in enumerate(batches(config, mesh, replica, poisoned)):
        results += replica.engine.feed(inputs(config, step, batch))
        if step in drained or step == STEPS - 1:
            results += replica.engine.drain()
            assert [result.step for result in results] == list(range(step + 1))
    states = replica.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


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


def recursion(mesh: Mesh, config: PretrainConfig, poisoned: bool) -> RankRun:
    """2BW by hand in one process: `older` finds gradients, `newest` is stepped by them."""
    config = replace(config, schedule=replace(config.schedule, name="1f1b", update=None))
    older, newest = (Replica(config, mesh, model_layers(config.model)) for _ in range(2))
    held = Held()
    older.optimizer = held  # type: ignore[assignment]
    older.engine = older.engine_for(config.batch.global_size)
    weights = [[state.master.clone() for state in newest.states()]] * 2
    results = []
    for step, batch in enumerate(batches(config, mesh, older, poisoned)):
        for state, values in zip(older.states(), weights[step], strict=True):
            state.master.copy_(values)
        result = older.engine.run(inputs(config, step, batch))
        results.append(result)
        if not result.skipped:
            for state in newest.states():
                state.gradients[0].copy_(held.gradients[state.name])
            rate = learning_rate(config.optimizer, step + 1, config.training.steps)
            newest.optimizer.update(newest.states(), newest.states()[0].newest + 1, rate, held.coefficient)
        weights.append([state.master.clone() for state in newest.states()])
    states = newest.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


def check_equal(ranks: list[RankRun], expected: RankRun) -> None:
    for rank in ranks:
        assert [(r.loss, r.gradient_norm, r.skipped) for r in rank.results] == [
            (r.loss, r.gradient_norm, r.skipped) for r in expected.results
        ]
    found, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.one_in(5)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("update", ["lazy", "eager"])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 2), (2, 3), (4, 4), (4, 8)])
def test_2bw_is_its_recursion(corpus: str, model: str, update: str, pipeline: int, microbatches: int) -> None:
    config = make_config(
        corpus,
        MODELS[model],
        schedule={"name": "2bw", "update": update},
        batch={"global_size": microbatches},
        optimizer={"clip_norm": 0.3},
    )
    (expected,) = run_threads({}, recursion, config, False)
    assert min(result.gradient_norm for result in expected.results) > 0.3, "nothing was clipped"
    check_equal(run_mesh({"pipeline": pipeline}, trained, config, (), False), expected)


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_2bw_skips_a_step_and_still_advances_the_version(corpus: str, update: str) -> None:
    config = make_config(corpus, GPT2_SHAPE, schedule={"name": "2bw", "update": update})
    (expected,) = run_threads({}, recursion, config, True)
    assert [result.skipped for result in expected.results] == [step == POISONED for step in range(STEPS)]
    ranks = run_mesh({"pipeline": 2}, trained, config, (), True)
    for rank in ranks:
        assert [result.skipped for result in rank.results] == [result.skipped for result in expected.results]
    found, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_where_2bw_is_drained_changes_nothing(corpus: str, update: str) -> None:
    config = make_config(corpus, GPT2_SHAPE, schedule={"name": "2bw", "update": update})
    (expected,) = run_threads({}, recursion, config, False)
    for drained in itertools.chain(itertools.combinations(range(STEPS - 1), 1), [tuple(range(STEPS))]):
        check_equal(run_threads({"pipeline": 2}, trained, config, drained, False), expected)


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        (BOTH, {}),
        ({"pipeline": 2, "tensor": 2}, {}),
        (BOTH, {"stage": 3}),
        pytest.param(BOTH, {"stage": 2, "gradient_buffers": 1}, marks=pytest.mark.exhaustive),
        pytest.param({"data": 4}, {"stage": 3, "shard_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_2bw_with_replicas_and_tensor_shards_is_its_recursion(
    corpus: str, sizes: dict[str, int], zero: dict[str, int]
) -> None:
    config = make_config(corpus, MODELS["gpt2-tied-dropout"], schedule={"name": "2bw"})
    (expected,) = run_threads({}, recursion, config, False)
    config.zero = ZeroConfig(**zero)
    ranks = run_mesh(sizes, trained, config, (2,), False)
    for rank in ranks:
        losses = torch.tensor([result.loss for result in rank.results], dtype=torch.float64)
        wanted = torch.tensor([result.loss for result in expected.results], dtype=torch.float64)
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        pytest.param(schedule, stage, marks=[] if stage == 3 else pytest.mark.exhaustive)
        for schedule in ("2bw lazy", "2bw eager", "pipedream")
        for stage in (1, 2, 3)
    ],
)
def test_versions_of_replicas_that_share_their_state_are_those_of_plain_ones(
    corpus: str, schedule: str, stage: int
) -> None:
    """Bit for bit: two numbers have one sum in any order, and where there is room for every layer's gradient it is
    reduced once an update. The norm is added up in other parts, so that none is taken."""
    name, *update = schedule.split()
    config = make_config(
        corpus,
        LLAMA_SHAPE,
        schedule={"name": name, "update": update[0] if update else None},
        optimizer={"clip_norm": None},
    )
    plain = run_threads(BOTH, trained, config, (2,), False)
    config.zero = ZeroConfig(stage=stage, gradient_buffers=8 if stage > 1 else 2)
    shared = run_threads(BOTH, trained, config, (2,), False)
    for rank, expected in zip(shared, plain, strict=True):
        assert [result.loss for result in rank.results] == [result.loss for result in expected.results]
    found, wanted = (assembled([rank.weights for rank in ranks]) for ranks in (shared, plain))
    for path, tensor in wanted.items():
        assert torch.equal(found[path], tensor), path


def test_pipedream_is_the_same_however_it_is_run_and_drained(corpus: str) -> None:
    config = make_config(corpus, LLAMA_SHAPE, schedule={"name": "pipedream"}, optimizer={"clip_norm": None})
    expected = run_threads({"pipeline": 2}, trained, config, (), False)
    check_equal(
        run_mesh({"pipeline": 2}, trained, config, (0, 3), False),
        RankRun(expected[0].results, [], [shard for rank in expected for shard in rank.weights]),
    )


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_ten_steps_and_ten_more_are_twenty(tmp_path: Path, corpus: str, schedule: str) -> None:
    sizes = {"pipeline": 2}
    options = {"schedule": {"name": schedule}}
    if schedule == "pipedream":
        options["optimizer"] = {"clip_norm": None}
    model = LLAMA_SHAPE if schedule == "pipedream" else MODELS["gpt2-tied-dropout"]
    whole: Outcome = run(sizes, config_in(tmp_path / "a", corpus, model, checkpoint={"every": None}, **options), 20)
    config = config_in(tmp_path / "b", corpus, model, **options)
    run(sizes, config, 10)
    again = run(sizes, config, 20)
    assert again.start == 10
    assert_same_bits(again, whole)


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 4}], ids=str)
def test_a_2bw_run_resumes_on_another_pipeline(tmp_path: Path, corpus: str, sizes: dict[str, int]) -> None:
    model, options = MODELS["gpt2-tied-dropout"], {"schedule": {"name": "2bw"}}
    whole = run({"pipeline": 2}, config_in(tmp_path / "a", corpus, model, checkpoint={"every": None}, **options), 20)
    config = config_in(tmp_path / "b", corpus, model, **options)
    run({"pipeline": 2}, config, 10)
    assert_same_bits(run(sizes, config, 20), whole)
