"""Engines whose ranks fail or stop, the moments of their gradient sums, and tensors that arrive on a device.

test_library.py checks the numbers.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megapipe.engine.engine import Engine
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import EngineError, StepInput, tensor_on
from megapipe.parallel.groups import Group, ReduceOperation, Work
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import Kind, build
from tests.engine.library_models import SGD, solo
from tests.support.counting_groups import CountingGroup, Traffic
from tests.support.meshes import in_mesh, run_threads
from tests.support.ranks import run_ranks


class Fragile(nn.Linear):
    """A layer that raises for rows that are not finite."""

    def __init__(self, fails: bool = True) -> None:
        super().__init__(8, 8, bias=False)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and not x.is_meta and not x.isfinite().all():
            raise ValueError("not finite")
        return super().forward(x)


def pipeline_of(
    mesh: Mesh, layers: list[Any], microbatches: int, schedule: str = "1f1b", wait: float = 20
) -> Pipeline:
    settings: dict[str, Any] = {"loss": Tensor.sum, "sample": torch.ones(1, 8), "optimizer": SGD, "timeout": wait}
    return Pipeline(layers, mesh, microbatches=microbatches, schedule=schedule, **settings)


def rows(microbatches: int, broken: int | None = None) -> Tensor:
    """A batch of one row a micro-batch, one of which is not finite."""
    batch = torch.ones(microbatches, 8)
    if broken is not None:
        batch[broken] = torch.inf
    return batch


def request_to_stop(mesh: Mesh) -> bool:
    pipeline = pipeline_of(mesh, [Fragile(), Fragile()], 2)
    return pipeline._engine.run(StepInput(0, pipeline._batch(rows(2), None), [1.0] * 2, stop=mesh.rank == 1)).stop


def test_one_rank_that_wants_to_stop_stops_all() -> None:
    assert run_threads({"pipeline": 2}, request_to_stop) == [True, True]


@pytest.mark.parametrize(("schedule", "section"), [("1f1b", "body"), ("pipedream", "prologue")])
def test_failures_name_their_unit_and_their_actions_number(schedule: str, section: Any) -> None:
    """Several updates after a micro-batch are one instruction."""
    pipeline = pipeline_of(solo(), [nn.Linear(8, 8), Fragile()], 4, schedule)
    actions = list(pipeline.schedule.actions(section, 0))
    (number,) = (number for number, each in enumerate(actions) if (each.kind, each.microbatch) == (Kind.FORWARD, 2))
    place = f"pipeline rank 0, step 0, action {number} of {schedule}: FORWARD stage 0 microbatch 2.*, unit 1: not fin"
    with pytest.raises(EngineError, match=place):
        pipeline.step(rows(4, broken=2))


def message_of_the_survivor(mesh: Mesh, victim: int) -> str:
    """The victim fails in a unit and ends; the other rank returns its error message."""
    pipeline = pipeline_of(mesh, [Fragile(victim == rank) for rank in range(2)], 4)
    try:
        pipeline.step(rows(4, broken=2))
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
    pipeline = pipeline_of(mesh, [Fragile(), Fragile()], 2, wait=0.2)
    engine = pipeline._assembly.engine(build("1f1b", 2, 2, mode="forward"))
    if mesh.rank == 1:
        return ""
    with pytest.raises(EngineError) as caught:
        engine.run(StepInput(3, pipeline._batch(rows(2), None), ()))
    return str(caught.value)


def test_sends_without_receiver_are_named_when_the_step_ends() -> None:
    message = run_threads({"pipeline": 2}, unanswered_send)[0]
    assert message.startswith(
        "pipeline rank 0, step 3, after the last action of 1f1b: rank 0 waited for rank 1 to take"
    )


def test_stages_of_another_rank_are_refused() -> None:
    stages: Any = {1: object()}
    with pytest.raises(EngineError, match=r"places stages \[0\] on pipeline rank 0, but stages \[1\] were given"):
        Engine(build("1f1b", 2, 2), 0, stages, None, None)  # type: ignore[arg-type]


class RecordingGroup(CountingGroup):
    """A group that notes when a sum starts and when it is awaited."""

    def __init__(self, group: Group, events: list[str]) -> None:
        super().__init__(group, Traffic())
        self.events = events

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        assert async_op
        self.events.append("start")
        return RecordingWork(self._group.all_reduce(tensor, op, async_op), self.events)


class RecordingWork(Work):
    def __init__(self, work: Work, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def events_of_a_step(mesh: Mesh) -> list[str]:
    events: list[str] = []
    group: Callable[..., Group] = mesh.group
    replicas = RecordingGroup(group("data", "context"), events)
    mesh.group = lambda *names: replicas if names == ("data", "context") else group(*names)  # type: ignore[method-assign]
    pipeline = pipeline_of(mesh, [Fragile() for _ in range(4)], 3)
    for index, (module,) in pipeline._assembly.layers():
        (weight,) = module.parameters()
        weight.register_post_accumulate_grad_hook(lambda _, layer=index: events.append(f"gradient {layer}"))
    pipeline.step(rows(3))
    return events


def test_units_are_reduced_once_while_the_backward_continues() -> None:
    descending = [f"gradient {layer}" for layer in reversed(range(4))]
    last = [event for gradient in descending for event in (gradient, "start")]
    for events in run_threads({"data": 2}, events_of_a_step):
        assert events == [*descending, *descending, *last, *["wait"] * 4]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_masks_arrive_contiguous_in_their_dtype(device: str) -> None:
    windows = np.array([[0, 5, 2**31 - 1], [7, 8, 9]])
    tokens = tensor_on(windows[:, 1:], torch.device(device))
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    assert tokens.device.type == device
    assert tokens.tolist() == [[5, 2**31 - 1], [8, 9]]
    mask = tensor_on(np.array([[1.0, 0.0]], dtype=np.float32), torch.device(device))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("array", "crosses"), [(np.array([[0, 5, 2**31 - 1]]), torch.int32), (np.ones((1, 2), np.float32), torch.float32)]
)
def test_gpus_read_narrow_integers_from_pinned_memory_asynchronously(
    monkeypatch: pytest.MonkeyPatch, array: np.ndarray, crosses: torch.dtype
) -> None:
    """Calls of torch on a machine without a GPU: in this order, with no other call in between."""
    asked: list[tuple[object, ...]] = []

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(("pin", tensor.dtype))
        return tensor

    def moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append(("copy", tensor.dtype, device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    received = tensor_on(array, torch.device("cuda"))
    assert asked == [("pin", crosses), ("copy", crosses, torch.device("cuda"), True)]
    assert received.dtype == torch.from_numpy(array).dtype
    assert received.tolist() == array.tolist()


@pytest.mark.gpu
def test_pinned_memory_may_be_used_again_at_once() -> None:
    """Copies that are still under way keep their source: many in a row arrive whole."""
    arrays = [np.full((64, 4097), number) for number in range(50)]
    moved = [tensor_on(array, torch.device("cuda")) for array in arrays]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(moved))
