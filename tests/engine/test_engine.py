"""The engine against plain autograd, and every layout of a toy model against one rank, bit for bit.

Also with split backwards, whose weight halves run as late as possible, and with reductions that start early.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.config.parallel import MeshShape
from megapipe.engine.engine import Engine
from megapipe.engine.step import EngineError, StepInput
from megapipe.parallel.groups import ReduceOperation, SoloGroup, Work
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import Kind, Schedule, build
from megapipe.schedules.actions import KIND
from megapipe.schedules.schedule import Sections
from tests.engine.toy import ROWS, Outcome, contexts, merged, reference_gradients, toy, train
from tests.support.meshes import Backend, in_mesh, run_mesh, run_threads
from tests.support.ranks import run_ranks

LAYERS = 4
SPLITS = {1: [4], 2: [1, 3], 3: [1, 2, 1], 4: [1, 1, 1, 1]}


def solo() -> Mesh:
    return connected_mesh(MeshShape({}), torch.device("cpu"))


def one_rank(num_microbatches: int) -> Outcome:
    return train(solo(), "1f1b", num_microbatches, SPLITS[1])


def test_gradients_equal_plain_autograd() -> None:
    replica = toy(solo(), "gpipe", 4, SPLITS[1])
    weights = {state.name: state.master.clone() for state in replica.states}
    replica.engine.run(StepInput(0, contexts(0, 4), [float(ROWS)] * 4, learning_rate=0.01))
    for name, expected in reference_gradients(0, 4, LAYERS, weights).items():
        torch.testing.assert_close(replica.gradients[0][name].double(), expected, rtol=1e-5, atol=1e-6)


def check_bits(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.losses == expected.losses
    assert outcome.norms == expected.norms
    for step, gradients in enumerate(expected.gradients):
        for layer, gradient in gradients.items():
            assert torch.equal(outcome.gradients[step][layer], gradient)
    assert outcome.weights.keys() == expected.weights.keys()
    for layer, weight in expected.weights.items():
        assert torch.equal(outcome.weights[layer], weight)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("backend", "pipeline", "num_microbatches"),
    [*(("threads", *each) for each in ((2, 1), (2, 5), (3, 2), (4, 8))), ("processes", 2, 5)],
)
def test_every_pipeline_equals_one_rank_bit_for_bit(
    backend: Backend, name: str, pipeline: int, num_microbatches: int
) -> None:
    ranks = run_mesh({"pipeline": pipeline}, train, name, num_microbatches, SPLITS[pipeline], backend=backend)
    check_bits(merged(ranks), one_rank(num_microbatches))


def unchanged(schedule: Schedule) -> Schedule:
    return schedule


def weight_halves_last(schedule: Schedule) -> Schedule:
    """Every backward split, and all weight halves at the end of the step."""
    body = []
    for rows in schedule.sections.body:
        weight = rows[rows[:, KIND] == Kind.BACKWARD].copy()
        weight[:, KIND] = Kind.BACKWARD_WEIGHT
        inputs = rows.copy()
        inputs[inputs[:, KIND] == Kind.BACKWARD, KIND] = Kind.BACKWARD_INPUT
        body.append(np.concatenate([inputs, weight]))
    return Schedule(schedule.header, Sections.flushing(tuple(body)))


@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_late_weight_halves_equal_whole_backwards_bit_for_bit(pipeline: int) -> None:
    ranks = run_threads({"pipeline": pipeline}, train, "1f1b", 6, SPLITS[pipeline], weight_halves_last)
    check_bits(merged(ranks), one_rank(6))


@pytest.mark.parametrize("change", [unchanged, weight_halves_last])
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "pipeline": 2}])
def test_replicas_sum_to_the_same_gradient(sizes: dict[str, int], change: Callable[[Schedule], Schedule]) -> None:
    pipeline = sizes.get("pipeline", 1)
    outcomes = run_mesh(sizes, train, "1f1b", 2, SPLITS[pipeline], change)
    expected = one_rank(4)
    for replica in (outcomes[:pipeline], outcomes[pipeline:]):
        outcome = merged(replica)
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        for layer, weight in expected.weights.items():
            torch.testing.assert_close(outcome.weights[layer], weight, rtol=1e-5, atol=1e-6)


def forward_losses(mesh: Mesh) -> list[float]:
    replica = toy(mesh, "1f1b", 3, SPLITS[mesh.size("pipeline")], mode="forward")
    result = replica.engine.run(StepInput(0, contexts(0, 3), ()))
    return [float(outputs[0]) for outputs in result.outputs]


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_forward_mode_returns_micro_batches_on_the_last_rank(backend: Backend) -> None:
    first, second = run_mesh({"pipeline": 2}, forward_losses, backend=backend)
    assert first == []
    assert second == forward_losses(solo())
    assert len(second) == 3


def test_gradients_that_are_not_finite_skip_the_update_everywhere() -> None:
    replica = toy(solo(), "1f1b", 2, SPLITS[1])
    before = {state.name: state.master.clone() for state in replica.states}
    poisoned = contexts(0, 2)
    poisoned[1].targets[0, 0] = float("nan")
    result = replica.engine.run(StepInput(0, poisoned, [float(ROWS)] * 2, learning_rate=0.01))
    assert result.skipped
    for state in replica.states:
        assert torch.equal(state.master, before[state.name])
        assert not state.gradients[0].any()
    result = replica.engine.run(StepInput(1, contexts(1, 2), [float(ROWS)] * 2, learning_rate=0.01))
    assert not result.skipped
    assert not torch.equal(replica.states[0].master, before["layers.0"])


def request_to_stop(mesh: Mesh) -> bool:
    replica = toy(mesh, "1f1b", 2, SPLITS[2])
    stop = mesh.rank == 1
    return replica.engine.run(StepInput(0, contexts(0, 2), [float(ROWS)] * 2, 0.01, stop)).stop


def test_one_rank_that_wants_to_stop_stops_all() -> None:
    assert run_threads({"pipeline": 2}, request_to_stop) == [True, True]


def test_a_failing_unit_is_named_with_its_action() -> None:
    replica = toy(solo(), "1f1b", 2, SPLITS[1])
    broken = contexts(0, 2)
    broken[1].inputs = torch.zeros(1)
    with pytest.raises(
        EngineError, match=r"pipeline rank 0, step 7, action \d+ of 1f1b: FORWARD stage 0 microbatch 1"
    ):
        replica.engine.run(StepInput(7, broken, [1.0]))


def test_failures_name_the_number_of_their_action() -> None:
    """Several updates after a micro-batch are one instruction."""
    engine, broken = toy(solo(), "pipedream", 4, SPLITS[1]).engine, contexts(0, 4)
    broken[2].inputs = torch.zeros(1)
    actions = list(engine.schedule.actions("prologue", 0))
    expected = [number for number, each in enumerate(actions) if (each.kind, each.microbatch) == (Kind.FORWARD, 2)]
    with pytest.raises(EngineError, match=f"step 0, action {expected[0]} of pipedream: FORWARD stage 0 microbatch 2"):
        engine.feed(StepInput(0, broken, [float(ROWS)] * 4, learning_rate=0.01))


def message_of_the_survivor(mesh: Mesh, victim: int) -> str:
    """The victim fails in a unit and ends; the other rank returns its error message."""
    replica = toy(mesh, "1f1b", 4, SPLITS[2])
    batch = contexts(0, 4)
    if mesh.rank == victim:
        batch[2].inputs = batch[2].targets = torch.zeros(ROWS + 1, ROWS + 1)
    try:
        replica.engine.run(StepInput(0, batch, [float(ROWS)] * 4, 0.01))
    except EngineError as error:
        if mesh.rank == victim:
            os._exit(1)
        return str(error)
    return "no error"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failed_ranks_peer_names_it_and_its_action(victim: int) -> None:
    message = run_ranks(2, in_mesh, {"pipeline": 2}, message_of_the_survivor, victim, may_die=[victim])[1 - victim]
    assert f"pipeline rank {1 - victim}, step 0, action" in message
    assert f"rank {1 - victim} waited for rank {victim} to send message" in message
    assert f"rank {victim} has ended" in message


def unanswered_send(mesh: Mesh) -> str:
    """Rank 1 never runs, so that rank 0's last sends stay under way: a forward-only rank 0 waits for nothing else."""
    replica = toy(mesh, "1f1b", 2, SPLITS[2], mode="forward", timeout=0.2)
    if mesh.rank == 1:
        return ""
    with pytest.raises(EngineError) as caught:
        replica.engine.run(StepInput(3, contexts(0, 2), ()))
    return str(caught.value)


def test_sends_without_receiver_are_named_when_the_step_ends() -> None:
    message = run_threads({"pipeline": 2}, unanswered_send)[0]
    assert message.startswith(
        "pipeline rank 0, step 3, after the last action of 1f1b: rank 0 waited for rank 1 to take"
    )


def test_stages_of_another_rank_are_refused() -> None:
    def build_wrong(mesh: Mesh) -> None:
        stages: Any = {1 - mesh.rank: object()}
        Engine(build("1f1b", 2, 2), mesh.rank, stages, None, None)  # type: ignore[arg-type]

    with pytest.raises(EngineError, match=r"places stages \[\d\] on pipeline rank"):
        run_threads({"pipeline": 2}, build_wrong, timeout=10.0)


class RecordingGroup(SoloGroup):
    """A group of one that notes when a sum starts and when it is awaited."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("data")
        self.events = events

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        assert async_op
        self.events.append("start")
        return RecordingWork(self.events)


class RecordingWork(Work):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait(self) -> None:
        self.events.append("wait")


def over_replicas(schedule: Schedule) -> Schedule:
    return Schedule(replace(schedule.header, data_parallel=True), schedule.sections)


def test_units_are_reduced_once_while_the_backward_continues() -> None:
    events: list[str] = []
    replica = toy(solo(), "1f1b", 3, [LAYERS], change=over_replicas, data_group=RecordingGroup(events))
    for index, module in enumerate(replica.modules):
        module.weight.register_post_accumulate_grad_hook(lambda _, layer=index: events.append(f"gradient {layer}"))
    replica.engine.run(StepInput(0, contexts(0, 3), [float(ROWS)] * 3, learning_rate=0.01))
    descending = [f"gradient {layer}" for layer in reversed(range(LAYERS))]
    last = [event for gradient in descending for event in (gradient, "start")]
    assert events == [*descending, *descending, *last, *["wait"] * LAYERS]
