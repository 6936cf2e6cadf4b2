"""Connects a rank's stages to their neighbours: both ends agree on shapes, links are made, slots allocated."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megapipe.engine.errors import EngineError
from megapipe.engine.stage import Stage, TensorSpec, described
from megapipe.engine.transfers import Boundary, Sender, Transfers, receive_slots
from megapipe.parallel.links import Edge, Link, LinkKind, make_links
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.schedule import Schedule

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Crossing:
    """Two stages that follow each other on different ranks, and what crosses between them."""

    stage: int
    next_stage: int
    specs: Specs
    activation: Edge
    gradient: Edge


class LinkPool:
    """A rank's links, made once. Engines of one pipeline take turns on them: each has drained them when its step ends.

    kind, timeout: as in `make_links`.
    """

    def __init__(self, mesh: Mesh, kind: LinkKind, timeout: float) -> None:
        self._mesh = mesh
        self._kind: LinkKind = kind
        self._timeout = timeout
        self._asked: set[Edge] = set()
        self._links: dict[Edge, Link] = {}

    def links(self, edges: Sequence[Edge]) -> Mapping[Edge, Link]:
        """At least this rank's ends of `edges`. A collective call over the pipeline group."""
        new = [edge for edge in edges if edge not in self._asked]
        self._asked.update(new)
        self._links |= make_links(self._mesh, new, self._kind, timeout=self._timeout)
        return self._links

    def close(self) -> None:
        """Release what the links hold. Peers may still receive what was sent; who waits for more is told of an end."""
        for link in self._links.values():
            link.close()
        self._links = {}


def connect(schedule: Schedule, mesh: Mesh, stages: Mapping[int, Stage], pool: LinkPool) -> Transfers:
    """Links and receive slots of this rank. A collective call over the pipeline group.

    Raises EngineError when a stage's outputs are not what the next stage takes.
    """
    pipeline = mesh.group("pipeline")
    shapes: dict[int, tuple[Specs, Specs]] = {}
    for part in pipeline.all_gather_object({s: (stage.inputs, stage.outputs) for s, stage in stages.items()}):
        shapes.update(part)
    crossings = _crossings(schedule, shapes)
    by_stages = {(each.stage, each.next_stage): each.activation for each in crossings}
    by_stages |= {(each.next_stage, each.stage): each.gradient for each in crossings}
    links = pool.links([by_stages[connection] for connection in schedule.header.connections])
    header, device = schedule.header, mesh.device
    training = header.mode == "train"
    transfers = Transfers({}, {}, {}, {})
    for crossing in crossings:
        grads = tuple(spec for spec in crossing.specs if spec.requires_grad)
        if crossing.stage in stages:
            transfers.send_activation[crossing.stage] = Sender(Boundary(links[crossing.activation], crossing.specs))
            if training:
                boundary = Boundary(links[crossing.gradient], grads)
                slots = header.gradient_slots[crossing.stage]
                transfers.receive_gradient[crossing.stage] = receive_slots(boundary, slots, device)
        if crossing.next_stage in stages:
            boundary = Boundary(links[crossing.activation], crossing.specs)
            slots = header.activation_slots[crossing.next_stage]
            transfers.receive_activation[crossing.next_stage] = receive_slots(boundary, slots, device)
            if training:
                transfers.send_gradient[crossing.next_stage] = Sender(Boundary(links[crossing.gradient], grads))
    return transfers


def _crossings(schedule: Schedule, shapes: Mapping[int, tuple[Specs, Specs]]) -> list[Crossing]:
    """Every boundary between ranks, in one order on all of them; its number tells its links' channels apart."""
    crossings: dict[tuple[int, int], Crossing] = {}
    for route in schedule.header.routes:
        for stage, following in itertools.pairwise(route):
            outputs, inputs = shapes[stage][1], shapes[following][0]
            if outputs != inputs:
                raise EngineError(
                    f"stage {stage} returns {described(outputs)} but stage {following} expects {described(inputs)}; "
                    "both ends of a boundary must declare the same tensors"
                )
            source, destination = schedule.rank_of(stage), schedule.rank_of(following)
            if source == destination or (stage, following) in crossings:
                continue
            channel = 2 * len(crossings)
            size = max((_bytes(spec) for spec in outputs), default=0)
            kept = schedule.header.activation_slots[following] * len(outputs)
            kept_gradients = schedule.header.gradient_slots[stage] * len(outputs)
            crossings[stage, following] = Crossing(
                stage,
                following,
                outputs,
                Edge(source, destination, channel, size, loans=kept),
                Edge(destination, source, channel + 1, size, loans=kept_gradients),
            )
    return list(crossings.values())


def _bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize
