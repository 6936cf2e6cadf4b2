"""PipeDream on the engine against its serial recursion: an update a micro-batch, staler the nearer the stage is to the
first, or as stale as that one everywhere with vertical sync. To the last bit of fp64."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.step import EngineError
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import ScheduleError
from tests.engine.asynchronous_runs import Outcome, train, train_after_a_restart, train_each
from tests.engine.asynchronous_toy import Case, expected, lowered, with_options
from tests.engine.serial_recursion import History
from tests.support.meshes import Backend, run_mesh, run_threads

SGD = OptimizerConfig(name="sgd", weight_decay=0.02, clip_norm=None)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.9),
    "adamw": OptimizerConfig(name="adamw", clip_norm=None),
}
SPLITS = {1: (3,), 2: (2, 1), 3: (1, 2, 1), 4: (1, 2, 1, 1)}


def pipedream(pipeline: int, num_microbatches: int, optimizer: str = "sgd", *, vertical_sync: bool = False) -> Case:
    case = Case("pipedream", SPLITS[pipeline], num_microbatches, OPTIMIZERS[optimizer])
    return with_options(case, vertical_sync=vertical_sync)


def serial(case: Case, steps: int, replicas: int = 1) -> History:
    """Stage s of p computes with weights that are p - 1 - s updates old, p - 1 with vertical sync."""
    oldest = len(case.layers_per_stage) - 1
    vertical_sync = case.options.get("vertical_sync", False)
    delays = [
        oldest if vertical_sync else oldest - stage
        for stage, layers in enumerate(case.layers_per_stage)
        for _ in range(layers)
    ]
    return expected(case, steps, delays, each=True, replicas=replicas)


def check_bits(case: Case, outcomes: Sequence[Outcome], history: History) -> None:
    """Every rank knows the losses, and is left with all versions of its weights that are still to be used."""
    per_step, pipeline = case.num_microbatches, len(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert [result.loss for result in outcome.results] == history.losses(per_step)
        assert [result.step for result in outcome.results] == list(range(len(outcome.results)))
        assert [result.gradient_norm for result in outcome.results] == history.norms[per_step - 1 :: per_step]
        versions = pipeline if case.options.get("vertical_sync", False) else pipeline - rank
        assert {age for _, age in outcome.weights} == set(range(versions))
        for (name, age), weight in outcome.weights.items():
            assert torch.equal(weight, history.weights[max(0, len(history.rows) - age)][name]), (rank, name, age)


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
        pipedream(pipeline, num_microbatches, optimizer, vertical_sync=vertical_sync)
        for num_microbatches in (pipeline, pipeline + 1, 2 * pipeline)
        for optimizer in OPTIMIZERS
        for vertical_sync in (False, True)
    ]
    by_rank = run_mesh({"pipeline": pipeline}, train_each, cases, 4, backend=backend)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        check_bits(case, outcomes, serial(case, 4))


def test_vertical_sync_is_another_recursion() -> None:
    plain, synced = (serial(pipedream(2, 2, vertical_sync=vertical_sync), 2) for vertical_sync in (False, True))
    assert torch.equal(plain.weights[1]["layers.2.weight"], synced.weights[1]["layers.2.weight"])
    assert not torch.equal(plain.weights[2]["layers.2.weight"], synced.weights[2]["layers.2.weight"])


@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("num_microbatches", [3, 5])
def test_a_drain_after_any_step_changes_nothing(num_microbatches: int, vertical_sync: bool) -> None:
    steps = 4
    case = pipedream(3, num_microbatches, "momentum", vertical_sync=vertical_sync)
    history = serial(case, steps)
    for drain_after in [*([step] for step in range(steps)), range(steps)]:
        check_bits(case, run_threads({"pipeline": 3}, train, case, steps, drain_after), history)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_resumes_exactly_where_every_version_is_kept(optimizer: str) -> None:
    case = pipedream(4, 5, optimizer)
    outcomes = run_threads({"pipeline": 4}, train_after_a_restart, case, 2, 2)
    check_bits(case, outcomes, serial(case, 4))


@pytest.mark.parametrize(("backend", "vertical_sync"), [("threads", False), ("threads", True), ("processes", True)])
def test_replicas_follow_the_recursion_of_their_micro_batches_together(backend: Backend, vertical_sync: bool) -> None:
    """Micro-batch k of all replicas enters update k."""
    case, steps = pipedream(2, 3, "momentum", vertical_sync=vertical_sync), 3
    outcomes = run_mesh({"data": 2, "pipeline": 2}, train, case, steps, backend=backend)
    history = serial(case, steps, replicas=2)
    for outcome in outcomes:
        assert [result.loss for result in outcome.results] == pytest.approx(history.losses(3), rel=1e-12)
        for (name, age), weight in outcome.weights.items():
            torch.testing.assert_close(weight, history.weights[-1 - age][name], rtol=1e-11, atol=1e-12)


def poisoned_run(mesh: Mesh, case: Case) -> str:
    with pytest.raises(EngineError) as caught:
        train(mesh, case, 4)
    return str(caught.value)


@pytest.mark.parametrize("microbatch", [0, 2])
def test_gradients_that_are_not_finite_end_the_run(microbatch: int) -> None:
    """The update is made before another rank knows of them."""
    case = replace(pipedream(2, 3), poisoned=(1, microbatch))
    for message in run_threads({"pipeline": 2}, poisoned_run, case):
        assert message.startswith(
            "the gradients of step 1 were not finite, and pipedream updates after every micro-batch"
        )


def test_fewer_micro_batches_than_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="3 micro-batches on 4 ranks would need weights that do not exist yet"):
        lowered(pipedream(4, 3))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 2)),
)
def test_any_pipeline_follows_the_recursion(
    layers_per_stage: list[int],
    more_microbatches: int,
    optimizer: str,
    vertical_sync: bool,
    tied: bool,
    drain_after: set[int],
) -> None:
    """A tied weight is used at two ages; each of its uses' gradients is added to the newest."""
    pipeline = len(layers_per_stage)
    case = with_options(
        Case(
            "pipedream",
            tuple(layers_per_stage),
            pipeline + more_microbatches,
            OPTIMIZERS[optimizer],
            tied=tied and sum(layers_per_stage) > 1,
        ),
        vertical_sync=vertical_sync,
    )
    outcomes = run_threads({"pipeline": pipeline}, train, case, 3, drain_after)
    check_bits(case, outcomes, serial(case, 3))
