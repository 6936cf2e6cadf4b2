"""The data-parallel reduction of a unit starts as soon as its gradient is complete, and is awaited at the end."""

from dataclasses import replace

import torch
from torch import Tensor

from megapipe.config.mesh_shape import MeshShape
from megapipe.engine.step import StepInput
from megapipe.parallel.groups import SoloGroup, Work
from megapipe.parallel.groups.group import ReduceOperation
from megapipe.parallel.launch import connected_mesh
from megapipe.schedules import Schedule
from tests.engine.toy import ROWS, contexts, toy

LAYERS = 4


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


def test_each_unit_is_reduced_once_while_the_backward_goes_on() -> None:
    events: list[str] = []
    mesh = connected_mesh(MeshShape({}), torch.device("cpu"))
    replica = toy(mesh, "1f1b", 3, [LAYERS], change=over_replicas, data_group=RecordingGroup(events))
    for index, module in enumerate(replica.modules):
        module.weight.register_post_accumulate_grad_hook(lambda _, layer=index: events.append(f"gradient {layer}"))
    replica.engine.run(StepInput(0, contexts(0, 3), [float(ROWS)] * 3, learning_rate=0.01))
    descending = [f"gradient {layer}" for layer in reversed(range(LAYERS))]
    last = [event for gradient in descending for event in (gradient, "start")]
    assert events == [*descending, *descending, *last, *["wait"] * LAYERS]
