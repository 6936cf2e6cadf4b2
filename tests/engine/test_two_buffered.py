"""PipeDream-2BW on the engine against its serial recursion, W(t+1) = W(t) - lr * g(W(t-1)), to the last fp64 bit."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.step import StepResult
from megapipe.parallel.groups import Group, ReduceOperation, SoloGroup, Work
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import ScheduleError
from tests.engine.asynchronous_runs import Outcome, train, train_after_a_restart, train_each
from tests.engine.asynchronous_toy import Case, Replica, expected, lowered, with_options
from tests.engine.serial_recursion import History, losses_and_gradients
from tests.support.meshes import Backend, run_mesh, run_threads

SGD = OptimizerConfig(name="sgd", weight_decay=0.02, clip_norm=None)
MOMENTUM = replace(SGD, momentum=0.9, clip_norm=0.5)
ADAMW = OptimizerConfig(name="adamw", clip_norm=0.5)
OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": ADAMW}
SPLITS = {1: (3,), 2: (2, 1), 3: (1, 2, 1), 4: (1, 2, 1, 1)}


def two_buffered(
    pipeline: int, num_microbatches: int, optimizer: OptimizerConfig = MOMENTUM, tied: bool = True
) -> Case:
    return Case("2bw", SPLITS[pipeline], num_microbatches, optimizer, tied=tied)


def serial(case: Case, steps: int, replicas: int = 1) -> History:
    """Delay 1 for every layer: the recursion knows nothing of stages."""
    return expected(case, steps, [1] * case.chain.num_layers, replicas=replicas)


def check_bits(outcomes: list[Outcome], history: History) -> None:
    """Every rank knows the same losses and norms, and is left with both versions of its weights."""
    for outcome in outcomes:
        assert [result.step for result in outcome.results] == list(range(len(history.rows)))
        assert [result.skipped for result in outcome.results] == history.skipped
        for result, loss, norm in zip(outcome.results, history.losses(), history.norms, strict=True):
            assert result.loss == loss or result.skipped
            assert result.gradient_norm == norm or result.skipped
    check_weights(outcomes, history)


def check_weights(outcomes: list[Outcome], history: History) -> None:
    weights = {key: weight for outcome in outcomes for key, weight in outcome.weights.items()}
    assert {name for name, _ in weights} == set(history.weights[0])
    assert {age for _, age in weights} == {0, 1}
    for (name, age), weight in weights.items():
        assert torch.equal(weight, history.weights[max(0, len(history.rows) - age)][name]), (name, age)


@pytest.mark.parametrize(
    ("backend", "pipeline"),
    [
        ("threads", 4),
        ("processes", 2),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("threads", 2), ("processes", 4))),
    ],
)
def test_equals_the_serial_recursion_bit_for_bit(backend: Backend, pipeline: int) -> None:
    cases = [
        with_options(two_buffered(pipeline, num_microbatches, OPTIMIZERS[optimizer], tied=False), update=update)
        for num_microbatches in (pipeline, pipeline + 1, 2 * pipeline)
        for optimizer in ("sgd", "adamw")
        for update in ("lazy", "eager")
    ]
    by_rank = run_mesh({"pipeline": pipeline}, train_each, cases, 5, backend=backend)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        check_bits(outcomes, serial(case, 5))


def test_the_recursion_is_not_the_one_without_a_delay() -> None:
    """The delay changes weights; otherwise the other tests would be blind to it."""
    case = two_buffered(2, 2)
    delayed, plain = serial(case, 3), expected(case, 3, [0] * case.chain.num_layers)
    assert delayed.losses()[0] == plain.losses()[0]
    assert delayed.losses()[1] != plain.losses()[1]
    assert not torch.equal(delayed.weights[2]["layers.0.weight"], plain.weights[2]["layers.0.weight"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("pipeline", [2, 4])
def test_clipping_and_a_tied_weight_keep_every_bit(backend: Backend, pipeline: int) -> None:
    cases = [
        with_options(two_buffered(pipeline, pipeline + 1, OPTIMIZERS[optimizer]), update=update)
        for optimizer in ("momentum", "adamw")
        for update in ("lazy", "eager")
    ]
    by_rank = run_mesh({"pipeline": pipeline}, train_each, cases, 5, backend=backend)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        history = serial(case, 5)
        assert min(history.norms) > 0.5  # the limit: every step is clipped
        check_bits(outcomes, history)


def test_a_skipped_step_advances_the_version_by_a_copy() -> None:
    """In processes; any pipeline of threads is poisoned below."""
    first, middle, last = 0, 2, 5
    cases = [
        with_options(replace(two_buffered(2, 3, ADAMW), poisoned=(step, 1)), update=update)
        for step in (first, middle, last)
        for update in ("lazy", "eager")
    ]
    by_rank = run_mesh({"pipeline": 2}, train_each, cases, last + 1)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        history = serial(case, last + 1)
        assert case.poisoned is not None
        assert [index for index, skipped in enumerate(history.skipped) if skipped] == [case.poisoned[0]]
        check_bits(outcomes, history)


@pytest.mark.parametrize("update", ["lazy", "eager"])
@pytest.mark.parametrize(("pipeline", "num_microbatches"), [(2, 2), (4, 5)])
def test_a_drain_after_any_step_changes_nothing(update: str, pipeline: int, num_microbatches: int) -> None:
    steps = 5
    case = with_options(two_buffered(pipeline, num_microbatches), update=update)
    history = serial(case, steps)
    for drain_after in [*([step] for step in range(steps)), range(steps)]:
        check_bits(run_threads({"pipeline": pipeline}, train, case, steps, drain_after), history)


def test_a_drain_between_processes_changes_nothing() -> None:
    case = two_buffered(2, 3, ADAMW)
    check_bits(run_mesh({"pipeline": 2}, train, case, 5, [1, 2]), serial(case, 5))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_ten_steps_and_ten_more_are_twenty(optimizer: str) -> None:
    case = two_buffered(2, 3, OPTIMIZERS[optimizer])
    history = serial(case, 20)
    check_bits(run_threads({"pipeline": 2}, train_after_a_restart, case, 10, 10), history)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_goes_on_from_any_step(before: int) -> None:
    case = two_buffered(4, 4, ADAMW)
    check_bits(run_threads({"pipeline": 4}, train_after_a_restart, case, before, 5 - before), serial(case, 5))


def train_and_evaluate(mesh: Mesh, case: Case, steps: int) -> tuple[list[StepResult], list[Tensor]]:
    """Training continues after the evaluation."""
    replica = Replica(mesh, case)
    results = replica.train(range(steps))
    losses = replica.losses(steps)
    return [*results, *replica.train(range(steps, steps + 2))], losses


@pytest.mark.parametrize(("backend", "steps"), [("threads", 2), ("processes", 3)])
def test_evaluation_uses_the_newest_version(backend: Backend, steps: int) -> None:
    case = two_buffered(2, 3)
    (_, nothing), (results, losses) = run_mesh({"pipeline": 2}, train_and_evaluate, case, steps, backend=backend)
    history = serial(case, steps + 2)
    newest = [history.weights[steps]] * case.chain.num_layers
    expected_losses, _ = losses_and_gradients(case.chain, newest, case.batch(steps), rows=1.0)
    assert nothing == []
    assert losses == expected_losses
    assert [result.loss for result in results] == history.losses()


@pytest.mark.parametrize(("backend", "pipeline"), [("threads", 1), ("threads", 2), ("processes", 2)])
def test_replicas_follow_the_recursion_of_the_global_batch(backend: Backend, pipeline: int) -> None:
    cases = [
        with_options(two_buffered(pipeline, pipeline + 1, tied=tied), update=update)
        for tied in (False, True)
        for update in ("lazy", "eager")
    ]
    by_rank = run_mesh({"data": 2, "pipeline": pipeline}, train_each, cases, 5, backend=backend)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        check_replicas(outcomes[:pipeline], outcomes[pipeline:], serial(case, 5, replicas=2))


def check_replicas(first: list[Outcome], second: list[Outcome], history: History) -> None:
    """Both are the same to the last bit, and what one process gets but for the order of sums."""
    for outcome in (*first, *second):
        assert [result.loss for result in outcome.results] == pytest.approx(history.losses(), rel=1e-12)
        assert [result.gradient_norm for result in outcome.results] == pytest.approx(history.norms, rel=1e-12)
        for (name, age), weight in outcome.weights.items():
            torch.testing.assert_close(weight, history.weights[-1 - age][name], rtol=1e-11, atol=1e-12)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(weight, other.weights[key]) for key, weight in one.weights.items())


class LateOnce(SoloGroup):
    """A group whose member is late for its first sum; a second one that is started meanwhile must not overtake it."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.name)
        self.group, self.late = group, True

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        if self.late:
            self.late = False
            time.sleep(0.3)
        return self.group.all_reduce(tensor, op, async_op)


def train_with_a_late_sum(mesh: Mesh, case: Case) -> Outcome:
    scalars, last = mesh.second_world(), mesh.size("pipeline") - 1
    late = mesh.coordinate("data") == 0 and mesh.coordinate("pipeline") == last
    replica = Replica(mesh, case, LateOnce(scalars) if late else scalars)
    return Outcome(replica.train(range(4)), replica.weights())


@pytest.mark.parametrize("pipeline", [1, 2])
def test_sums_of_neighbouring_steps_keep_their_order(pipeline: int) -> None:
    """A lazy update comes after the last rank's next sum, so that two of them are under way there. (Not where that
    one waits for a tied weight's gradient from a rank that waits for the sum before.)"""
    case = two_buffered(pipeline, pipeline, tied=False)
    outcomes = run_threads({"data": 2, "pipeline": pipeline}, train_with_a_late_sum, case)
    check_replicas(outcomes[:pipeline], outcomes[pipeline:], serial(case, 4, replicas=2))


@pytest.mark.parametrize(("pipeline", "num_microbatches"), [(2, 1), (4, 3)])
def test_too_few_micro_batches_are_refused_with_the_reason(pipeline: int, num_microbatches: int) -> None:
    with pytest.raises(
        ScheduleError,
        match=f"{num_microbatches} micro-batches on {pipeline} ranks would need weights that do not exist yet",
    ):
        lowered(two_buffered(pipeline, num_microbatches))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["lazy", "eager"]),
    st.booleans(),
    st.sets(st.integers(0, 3)),
    st.none() | st.tuples(st.integers(0, 3), st.just(0)),
)
def test_any_pipeline_follows_the_recursion(
    layers_per_stage: list[int],
    more_microbatches: int,
    optimizer: str,
    update: str,
    tied: bool,
    drain_after: set[int],
    poisoned: tuple[int, int] | None,
) -> None:
    pipeline = len(layers_per_stage)
    case = with_options(
        Case(
            "2bw",
            tuple(layers_per_stage),
            pipeline + more_microbatches,
            OPTIMIZERS[optimizer],
            tied=tied and sum(layers_per_stage) > 1,
            poisoned=poisoned,
        ),
        update=update,
    )
    check_bits(run_threads({"pipeline": pipeline}, train, case, 4, drain_after), serial(case, 4))
