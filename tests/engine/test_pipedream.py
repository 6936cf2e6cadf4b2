"""PipeDream on the engine against its serial recursion: an update a micro-batch, staler the nearer the stage is to the
first, or as stale as that one everywhere with vertical sync. To the last bit of fp64."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megapipe.engine.step import EngineError
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.registry import Options
from tests.engine.recursion_runs import (
    SPLITS,
    UNCLIPPED,
    Case,
    cases,
    check_bits,
    check_each,
    check_replicas,
    serial,
    train,
)
from tests.support.meshes import Backend, run_mesh, run_threads

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
def test_equals_the_serial_recursion_bit_for_bit(backend: Backend, pipeline: int) -> None:
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
def test_any_pipeline_follows_the_recursion(case: Case) -> None:
    """A tied weight is used at two ages; each of its uses' gradients is added to the newest."""
    outcomes = run_threads({"pipeline": len(case.layers_per_stage)}, train, case, 3)
    check_bits(case, outcomes, serial(case, 3))
