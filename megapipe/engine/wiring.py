"""Connects a rank's stages to their neighbours: both ends agree on shapes, links are made, slots allocated."""

import itertools
from collections.abc import Mapping, Sequence

import torch

from megapipe.engine.errors import EngineError
from megapipe.engine.stage import Stage, TensorSpec, described
from megapipe.engine.transfers import Boundary, Sender, Transfers, receive_slots
from megapipe.parallel.links import Edge, LinkEnd, LinkKind, make_links
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.schedule import Connection, Header, Schedule

Specs = tuple[TensorSpec, ...]


class LinkPool:
    """A rank's links, made once. Engines of one pipeline take turns on them: each has drained them when its step ends.

    kind, timeout: as in `make_links`.
    """

    def __init__(self, mesh: Mesh, kind: LinkKind, timeout: float) -> None:
        self._mesh = mesh
        self._kind: LinkKind = kind
        self._timeout = timeout
        self._edges: dict[Connection, Edge] = {}
        self._links: dict[Connection, LinkEnd] = {}
        self._made: list[LinkEnd] = []

    def links(self, edges: Sequence[Edge]) -> Mapping[Connection, LinkEnd]:
        """At least this rank's ends of `edges`, by source and destination. A collective call over the pipeline group.

        A link that an earlier engine was given is used again if it is large enough.
        """
        new = [edge for edge in edges if edge.pair not in self._edges or not self._edges[edge.pair].serves(edge)]
        self._edges |= {edge.pair: edge for edge in new}
        made = make_links(self._mesh, new, self._kind, timeout=self._timeout)
        self._made += made.values()
        self._links |= {edge.pair: link for edge, link in made.items()}
        return dict(self._links)

    def close(self) -> None:
        """Release what the links hold. Peers may still receive what was sent; who waits for more is told of an end."""
        for link in self._made:
            link.close()
        self._made, self._links, self._edges = [], {}, {}


def connect(schedule: Schedule, mesh: Mesh, stages: Mapping[int, Stage], pool: LinkPool) -> Transfers:
    """Links and receive slots of this rank. A collective call over the pipeline group.

    Raises EngineError when a stage's outputs are not what the next stage takes.
    """
    pipeline = mesh.group("pipeline")
    shapes: dict[int, tuple[Specs, Specs]] = {}
    for part in pipeline.all_gather_object({s: (stage.inputs, stage.outputs) for s, stage in stages.items()}):
        shapes.update(part)
    crossings = _crossings(schedule, shapes)
    links = pool.links(link_edges(schedule.header, crossings))
    header, device = schedule.header, mesh.device
    training = header.mode == "train"
    transfers = Transfers({}, {}, {}, {})
    for (stage, following), specs in crossings.items():
        source, destination = header.stages[stage].rank, header.stages[following].rank
        grads = tuple(spec for spec in specs if spec.requires_grad)
        if stage in stages:
            transfers.send_activation[stage] = Sender(Boundary(links[source, destination], specs))
            if training:
                boundary = Boundary(links[destination, source], grads)
                transfers.receive_gradient[stage] = receive_slots(boundary, header.gradient_slots[stage], device)
        if following in stages:
            boundary = Boundary(links[source, destination], specs)
            slots = header.activation_slots[following]
            transfers.receive_activation[following] = receive_slots(boundary, slots, device)
            if training:
                transfers.send_gradient[following] = Sender(Boundary(links[destination, source], grads))
    return transfers


def link_edges(header: Header, crossings: Mapping[tuple[int, int], Specs]) -> list[Edge]:
    """The edges of a schedule's links, in the order in which they are connected.

    crossings: of each two stages that follow one another on different ranks, what crosses between them.
    """
    size, loans = dict.fromkeys(header.connections, 0), dict.fromkeys(header.connections, 0)
    for (stage, following), specs in crossings.items():
        source, destination = header.stages[stage].rank, header.stages[following].rank
        for pair, slots in (
            ((source, destination), header.activation_slots[following]),
            ((destination, source), header.gradient_slots[stage]),
        ):
            if pair in size:
                size[pair] = max([size[pair], *map(_bytes, specs)])
                loans[pair] += slots * len(specs)
    return [Edge(*pair, size[pair], loans=loans[pair]) for pair in header.connections]


def _crossings(schedule: Schedule, shapes: Mapping[int, tuple[Specs, Specs]]) -> dict[tuple[int, int], Specs]:
    """Return the tensors that cross each boundary between ranks, by the stages on both sides."""
    crossings: dict[tuple[int, int], Specs] = {}
    for route in schedule.header.routes:
        for stage, following in itertools.pairwise(route):
            outputs, inputs = shapes[stage][1], shapes[following][0]
            if outputs != inputs:
                raise EngineError(
                    f"stage {stage} returns {described(outputs)} but stage {following} expects {described(inputs)}; "
                    "both ends of a boundary must declare the same tensors"
                )
            if schedule.rank_of(stage) != schedule.rank_of(following):
                crossings[stage, following] = outputs
    return crossings


def _bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize
