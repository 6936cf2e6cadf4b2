"""2BW, PipeDream and 1F1B on the engine against their serial recursions, to the last bit of fp64.

PipeDream updates after each micro-batch; its weights are staler the nearer the stage is to the first, or with vertical
sync everywhere as stale as there.
"""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from torch import Tensor

from megapipe.engine.step import EngineError, StepResult
from megapipe.parallel.groups import Group, ReduceOperation, SoloGroup, Work
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.registry import Options
from tests.engine.recursion_runs import (
    OPTIMIZERS,
    SPLITS,
    UNCLIPPED,
    Case,
    Outcome,
    Replica,
    cases,
    check_bits,
    check_each,
    check_replicas,
    serial,
    train,
    train_each,
)
from tests.engine.serial_recursion import losses_and_gradients
from tests.support.meshes import Backend, run_mesh, run_threads

UPDATES: list[tuple[str, Options]] = [("2bw", {"update": "lazy"}), ("2bw", {"update": "eager"})]
FLUSHING: tuple[str, Options] = ("1f1b", {})
STEPS = 6


def cases_of(pipeline: int, num_microbatches: int, optimizer: str = "momentum", tied: bool = True) -> list[Case]:
    """A case with lazy updates, and one with eager ones."""
    stages, chosen = SPLITS[pipeline], OPTIMIZERS[optimizer]
    return [Case(name, stages, num_microbatches, chosen, tied, options) for name, options in UPDATES]


@pytest.mark.parametrize(
    ("backend", "pipeline"),
    [
        ("processes", 2),
        pytest.param("threads", 4, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("threads", 2), ("processes", 4))),
    ],
)
def test_2bw_and_1f1b_equal_their_recursions_bit_for_bit(backend: Backend, pipeline: int) -> None:
    """Also clipped, with a tied weight, drained after any step, and where a skipped step advances the version."""
    counts = (pipeline, pipeline + 1, 2 * pipeline) if backend == "threads" else (2 * pipeline,)
    chosen = [
        case
        for num_microbatches in counts
        for optimizer in ("sgd", "adamw")
        for case in cases_of(pipeline, num_microbatches, optimizer, tied=False)
    ]
    for case in cases_of(pipeline, pipeline + 1):
        flushing = replace(case, name=FLUSHING[0], options=FLUSHING[1])
        chosen += [case, replace(case, optimizer=OPTIMIZERS["adamw"])]
        drained = [*([step] for step in range(STEPS)), range(STEPS)] if backend == "threads" else [[2]]
        chosen += [replace(case, drain_after=steps) for steps in drained]
        chosen += [replace(each, poisoned=(step, 1)) for step in (0, 2, STEPS - 1) for each in (case, flushing)]
    check_each(backend, pipeline, chosen, STEPS)


def train_and_evaluate(mesh: Mesh, case: Case, steps: int) -> tuple[list[StepResult], list[Tensor]]:
    """Training continues after the evaluation."""
    replica = Replica(mesh, case)
    results = replica.train(range(steps))
    losses = replica.losses(steps)
    return [*results, *replica.train(range(steps, steps + 2))], losses


@pytest.mark.parametrize(("backend", "steps"), [("threads", 2), ("processes", 3)])
def test_evaluation_uses_the_newest_version(backend: Backend, steps: int) -> None:
    case = cases_of(2, 3)[0]
    (_, nothing), (results, losses) = run_mesh({"pipeline": 2}, train_and_evaluate, case, steps, backend=backend)
    history = serial(case, steps + 2)
    newest = [history.weights[steps]] * case.chain.num_layers
    expected_losses, _ = losses_and_gradients(case.chain, newest, case.batch(steps), rows=1.0)
    assert nothing == []
    assert losses == expected_losses
    assert [result.loss for result in results] == history.losses()


@pytest.mark.parametrize(("backend", "pipeline"), [("threads", 1), ("threads", 2), ("processes", 2)])
def test_replicas_follow_the_recursion_of_the_global_batch(backend: Backend, pipeline: int) -> None:
    chosen = [case for tied in (False, True) for case in cases_of(pipeline, pipeline + 1, tied=tied)]
    by_rank = run_mesh({"data": 2, "pipeline": pipeline}, train_each, chosen, 5, backend=backend)
    for case, *outcomes in zip(chosen, *by_rank, strict=True):
        check_replicas(case, outcomes, serial(case, 5, replicas=2))


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
    if mesh.coordinate("data") == 0 and mesh.coordinate("pipeline") == mesh.size("pipeline") - 1:
        second_world = mesh.second_world
        mesh.second_world = lambda: LateOnce(second_world())  # type: ignore[method-assign]
    return train(mesh, case, 4)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_sums_of_neighbouring_steps_keep_their_order(pipeline: int) -> None:
    """A lazy update comes after the last rank's next sum, so that two of them are under way there. (Not where that
    one waits for a tied weight's gradient from a rank that waits for the sum before.)"""
    case = cases_of(pipeline, pipeline, tied=False)[0]
    outcomes = run_threads({"data": 2, "pipeline": pipeline}, train_with_a_late_sum, case)
    check_replicas(case, outcomes, serial(case, 4, replicas=2))


@settings(max_examples=30, deadline=None)
@given(cases([*UPDATES, FLUSHING], OPTIMIZERS, steps=4))
def test_any_pipeline_follows_the_recursion_of_2bw(case: Case) -> None:
    outcomes = run_threads({"pipeline": len(case.layers_per_stage)}, train, case, 4)
    check_bits(case, outcomes, serial(case, 4))


BOTH = (False, True)
SYNCED: list[tuple[str, Options]] = [("pipedream", {"vertical_sync": vertical_sync}) for vertical_sync in BOTH]


def pipedream(pipeline: int, num_microbatches: int, vertical_sync: bool, optimizer: str = "momentum") -> Case:
    name, options = SYNCED[vertical_sync]
    return Case(name, SPLITS[pipeline], num_microbatches, UNCLIPPED[optimizer], options=options)


@pytest.mark.parametrize(
    ("backend", "pipeline"),
    [
        ("threads", 4),
        ("processes", 2),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("threads", 2), ("processes", 4))),
    ],
)
def test_pipedream_equals_its_recursion_bit_for_bit(backend: Backend, pipeline: int) -> None:
    chosen = [
        pipedream(pipeline, num_microbatches, vertical_sync, optimizer)
        for num_microbatches in (pipeline, pipeline + 1, 2 * pipeline)
        for optimizer in UNCLIPPED
        for vertical_sync in BOTH
    ]
    check_each(backend, pipeline, chosen, 4)


def test_a_drain_after_any_step_changes_nothing() -> None:
    drains = [*([step] for step in range(4)), range(4)]
    chosen = [pipedream(3, count, vertical_sync) for count in (3, 5) for vertical_sync in BOTH]
    check_each("threads", 3, [replace(case, drain_after=steps) for case in chosen for steps in drains], 4)


@pytest.mark.parametrize(("backend", "vertical_sync"), [("threads", False), ("threads", True), ("processes", True)])
def test_replicas_follow_the_recursion_of_their_micro_batches_together(backend: Backend, vertical_sync: bool) -> None:
    """Micro-batch k of all replicas enters update k."""
    case = pipedream(2, 3, vertical_sync)
    outcomes = run_mesh({"data": 2, "pipeline": 2}, train, case, 3, backend=backend)
    check_replicas(case, outcomes, serial(case, 3, replicas=2))


def poisoned_run(mesh: Mesh, case: Case) -> str:
    with pytest.raises(EngineError) as caught:
        train(mesh, case, 4)
    return str(caught.value)


@pytest.mark.parametrize("microbatch", [0, 2])
def test_gradients_that_are_not_finite_end_the_run(microbatch: int) -> None:
    """The update is made before another rank knows of them."""
    case = replace(pipedream(2, 3, vertical_sync=False, optimizer="sgd"), poisoned=(1, microbatch))
    for message in run_threads({"pipeline": 2}, poisoned_run, case):
        assert message.startswith(
            "the gradients of step 1 were not finite, and pipedream updates after every micro-batch"
        )


@settings(max_examples=15, deadline=None)
@given(cases(SYNCED, UNCLIPPED, steps=3))
def test_any_pipeline_follows_the_recursion_of_pipedream(case: Case) -> None:
    """A tied weight is used at two ages; each of its uses' gradients is added to the newest."""
    outcomes = run_threads({"pipeline": len(case.layers_per_stage)}, train, case, 3)
    check_bits(case, outcomes, serial(case, 3))
