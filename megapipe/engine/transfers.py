"""Activations and gradients between stages: links, preallocated receive slots, posted receives, sends in flight.

Between the ends of a route and vocabulary shards on all pipeline ranks (`schedules.vocabulary`), tensors move by
collectives. Output layer: the last hidden states are broadcast to all shards, and their gradients are summed. Input
embedding: the rows that shards look up are summed for the first stage, and the gradient of the sum is broadcast. The
passes of all shards have the same order on all ranks. So do these collectives, because a broadcast starts with a pass
and a sum starts at its end.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from megapipe.engine.stage import Specs, Stage, TensorSpec, described
from megapipe.engine.step import EngineError, StepState
from megapipe.layers.split import Tensors
from megapipe.parallel.groups import FINISHED, Group, Work
from megapipe.parallel.links import Edge, LinkEnd, Loan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind, make_links
from megapipe.schedules.schedule import Connection, Header, Schedule


class ReceiveSlots(ABC):
    """Receive buffers for the tensors that cross one stage boundary in one direction. A receive is posted to a slot
    and awaited; the slot is free when the schedule reuses it."""

    @abstractmethod
    def post(self, slot: int, part: int = 0) -> None:
        """Start receiving the next message of the link into `slot`. part: number of the message's sequence slice."""

    @abstractmethod
    def take(self, slot: int) -> Tensors:
        """Wait for the message of `slot` and return its tensors, valid until the slot is posted again."""

    def release(self) -> None:  # noqa: B027 - only lent slots have something to release
        """Release the messages that were taken, if no receive is posted, because engines use a link's memory in
        turn."""

    @abstractmethod
    def without_peer(self) -> "ReceiveSlots":
        """Return slots in the same memory that receive nothing."""


def receive_slots(link: LinkEnd, specs: Specs, num_slots: int, device: torch.device) -> ReceiveSlots:
    """Return slots in the link's memory if it lends memory, otherwise in buffers of this rank. specs: of a message."""
    return LentSlots(link, specs, num_slots) if link.lends else BufferSlots(link, specs, num_slots, device)


class BufferSlots(ReceiveSlots):
    """Slots that are buffers of this rank."""

    def __init__(self, link: LinkEnd, specs: Specs, num_slots: int, device: torch.device) -> None:
        self._link, self._specs = link, specs
        self._buffers = _allocated(specs, num_slots, device)
        self._messages = list(self._buffers)
        self._pending: dict[int, list[Work]] = {}

    def post(self, slot: int, part: int = 0) -> None:
        self._messages[slot] = _within(self._specs, self._buffers[slot], part)
        self._pending[slot] = [self._link.receive(message) for message in self._messages[slot]]

    def take(self, slot: int) -> Tensors:
        for transfer in self._pending.pop(slot):
            transfer.wait()
        return self._messages[slot]

    def without_peer(self) -> ReceiveSlots:
        return NoiseSlots(self._buffers, self._specs)


def _allocated(specs: Specs, count: int, device: torch.device) -> list[Tensors]:
    return [tuple(spec.allocate(device) for spec in specs) for _ in range(count)]


def _within(specs: Specs, buffers: Tensors, part: int) -> Tensors:
    return tuple([spec.within(buffer, part) for spec, buffer in zip(specs, buffers, strict=True)])


class LentSlots(ReceiveSlots):
    """Slots that are messages in the link's own memory, so that nothing is copied."""

    def __init__(self, link: LinkEnd, specs: Specs, num_slots: int) -> None:
        self._link, self._specs = link, specs
        self._num_slots = num_slots
        self._largest = tuple(spec.allocate(torch.device("meta")) for spec in specs)
        self._loans: dict[int, list[Loan]] = {}

    def post(self, slot: int, part: int = 0) -> None:
        for loan in self._loans.get(slot, ()):
            loan.give_back()
        self._loans[slot] = [self._link.borrow(like) for like in _within(self._specs, self._largest, part)]

    def release(self) -> None:
        for loans in self._loans.values():
            for loan in loans:
                loan.give_back()
        self._loans.clear()

    def take(self, slot: int) -> Tensors:
        return tuple([loan.take() for loan in self._loans[slot]])

    def without_peer(self) -> ReceiveSlots:
        """Return slots in separate memory, because the link lends its memory only for messages."""
        buffers = _allocated(self._specs, self._num_slots, torch.device("cpu"))
        return NoiseSlots(buffers, self._specs)


class NoiseSlots(ReceiveSlots):
    """Slots that are filled with random numbers, which give experts realistic loads; integers are 0."""

    def __init__(self, buffers: Sequence[Tensors], specs: Specs) -> None:
        self._buffers, self._specs = list(buffers), specs
        self._messages = list(buffers)

    def post(self, slot: int, part: int = 0) -> None:
        """Do nothing: no message arrives."""
        self._messages[slot] = _within(self._specs, self._buffers[slot], part)

    def take(self, slot: int) -> Tensors:
        """Fill the slot's buffers and return them. Torch's generator affects no result of a run."""
        with torch.no_grad():
            for buffer in self._messages[slot]:
                if buffer.is_floating_point():
                    buffer.uniform_(-1.0, 1.0)
                else:
                    buffer.zero_()
        return self._messages[slot]

    def without_peer(self) -> ReceiveSlots:
        return self


class Sender:
    """Sends the tensors that cross one stage boundary in one direction.

    At most one message per slot of the link is in flight, so that a fast rank does not keep all tensors that it has
    sent. Waiting for the oldest message cannot hang: schedules are proved free of deadlock even if every send waits
    for its receive.
    """

    def __init__(self, link: LinkEnd, specs: Specs) -> None:
        self._link, self._specs = link, specs
        self._in_flight: deque[tuple[Work, Tensor]] = deque()

    def send(self, tensors: Tensors, part: int = 0) -> None:
        """Start sending; each tensor is kept alive until it has left. part: number of their sequence slice.

        Raises ValueError if shapes or dtypes differ from those that the receiver allocated.
        """
        agreed = [(torch.Size(spec.of_slice(part)), spec.dtype) for spec in self._specs]
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != agreed:
            raise ValueError(
                f"the stage returned {described(tensors)}, but declared {described(self._specs)}; "
                "always return these shapes and types (under autocast: convert the result)"
            )
        for tensor in tensors:
            transfer = self._link.send(tensor)
            if transfer is not FINISHED:
                self._in_flight.append((transfer, tensor.detach()))
        while len(self._in_flight) > self._link.edge.slots:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait until all messages have been sent."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        transfer, _ = self._in_flight.popleft()
        transfer.wait()

    def without_peer(self) -> "Sender":
        """Return a sender that drops everything."""
        return _Dropping(self._link, self._specs)


class _Dropping(Sender):
    def send(self, tensors: Tensors, part: int = 0) -> None:
        """Keep the tensors for the time of a real message; no rank receives them."""
        self._in_flight += ((FINISHED, tensor.detach()) for tensor in tensors)
        while len(self._in_flight) > self._link.edge.slots:
            self._finish_oldest()


@dataclass(frozen=True)
class Shards:
    """The shard of an output layer or an input embedding on one rank.

    stage: its id. end: the stage at that end of the route. is_home: that stage is on this rank. group: all ranks that
    shard the layer. source: rank in the group that broadcasts. specs: the one tensor between the two stages.
    """

    stage: int
    end: int
    is_home: bool
    group: Group
    source: int
    specs: Specs
    device: torch.device

    @classmethod
    def of(cls, header: Header, stage: int, group: Group, specs: Specs, device: torch.device) -> Self:
        """Return the shard that `stage` is. group: pipeline and tensor ranks, with tensor ranks adjacent."""
        end = header.routes[0][-1 if stage in header.outputs else 0]
        home = header.stages[end].rank
        source = home * (group.size // header.num_ranks)
        return cls(stage, end, header.stages[stage].rank == home, group, source, specs, device)

    def broadcast(self, step: StepState, microbatch: int, own: Tensors | None) -> Tensors:
        """Return the tensors of the stage at the end of the route: `own` on its rank, otherwise those that arrive."""
        tensors = tuple(spec.allocate(self.device) for spec in self.specs) if own is None else own
        for each in tensors:
            work = self.group.broadcast(each, self.source, async_op=True)
            if self.group.rank == self.source:
                step.handed_out[self.stage, microbatch] = each, work
            else:
                work.wait()
                if self.is_home:
                    step.handed_out[self.stage, microbatch] = each, None
        return tensors

    def start_sum(self, step: StepState, microbatch: int, tensors: Tensors) -> None:
        """Start summing tensors of a micro-batch over all shards."""
        for each in tensors:
            step.summed[self.stage, microbatch] = each, self.group.all_reduce(each, async_op=True)

    def end_broadcast(self, step: StepState, microbatch: int) -> None:
        """Wait for the broadcast of a micro-batch, if this rank has started one."""
        _, work = step.handed_out.pop((self.stage, microbatch), (None, None))
        if work is not None:
            work.wait()

    def end_others(self, step: StepState) -> None:
        """Wait for the sums whose result is for other ranks."""
        for key in () if self.is_home else [key for key in step.summed if key[0] == self.stage]:
            step.summed.pop(key)[1].wait()

    def end_all(self, step: StepState) -> None:
        """Wait for all collectives in progress, except sums that the stage at the end of the route on this rank still
        needs."""
        self.end_others(step)
        for _, microbatch in [key for key in step.handed_out if key[0] == self.stage]:
            self.end_broadcast(step, microbatch)

    def sum_of(self, step: StepState, microbatch: int) -> Tensors:
        """Return the sum of a micro-batch, on the rank of the stage at the end of the route."""
        summed, work = step.summed.pop((self.stage, microbatch))
        work.wait()
        return (summed,)


@dataclass(frozen=True)
class Transfers:
    """All boundaries of one rank.

    receive_*[stage], send_*[stage]: present if the neighbouring stage is on another rank. shards: by stage, the two
    vocabulary shards of this rank, if the vocabulary is sharded over all pipeline ranks.
    """

    receive_activation: dict[int, ReceiveSlots]
    receive_gradient: dict[int, ReceiveSlots]
    send_activation: dict[int, Sender]
    send_gradient: dict[int, Sender]
    shards: Mapping[int, Shards] = field(default_factory=dict)

    @cached_property
    def ends(self) -> Mapping[int, Shards]:
        """`shards` by the stages at their ends of the route."""
        return {each.end: each for each in self.shards.values()}

    def drain(self) -> None:
        """Wait, at the end of a section, until all messages of this rank have been sent, and release the received
        ones."""
        for sender in (*self.send_activation.values(), *self.send_gradient.values()):
            sender.drain()
        for slots in (*self.receive_activation.values(), *self.receive_gradient.values()):
            slots.release()

    def without_peers(self) -> "Transfers":
        """Return boundaries that send nothing and receive random numbers."""
        return Transfers(
            {stage: slots.without_peer() for stage, slots in self.receive_activation.items()},
            {stage: slots.without_peer() for stage, slots in self.receive_gradient.items()},
            {stage: sender.without_peer() for stage, sender in self.send_activation.items()},
            {stage: sender.without_peer() for stage, sender in self.send_gradient.items()},
            self.shards,
        )


class LinkPool:
    """A rank's links, which are created once. Engines of one pipeline use them in turn: each has drained them when its
    step ends.

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
        """Return this rank's ends of `edges`, and possibly of further links, by source and destination. A collective
        call of the pipeline group.

        A link of an earlier engine is reused if it is large enough.
        """
        new = [edge for edge in edges if edge.pair not in self._edges or not self._edges[edge.pair].serves(edge)]
        self._edges |= {edge.pair: edge for edge in new}
        made = make_links(self._mesh, new, self._kind, timeout=self._timeout)
        self._made += made.values()
        self._links |= {edge.pair: link for edge, link in made.items()}
        return dict(self._links)

    def close(self) -> None:
        """Release the memory of the links. Peers may still receive messages that were sent; a peer that waits for more
        gets an error."""
        for link in self._made:
            link.close()
        self._made, self._links, self._edges = [], {}, {}


def connect(schedule: Schedule, mesh: Mesh, stages: Mapping[int, Stage], pool: LinkPool) -> Transfers:
    """Connect this rank to its neighbors: links and receive slots. A collective call of the pipeline group.

    Raises EngineError if the outputs of a stage are not the inputs of the next stage.
    """
    own_shapes = {number: (stage.inputs, stage.outputs) for number, stage in stages.items()}
    shapes: dict[int, tuple[Specs, Specs]] = {}
    for part in mesh.group("pipeline").all_gather_object(own_shapes):
        shapes.update(part)
    crossings = _crossings(schedule, shapes)
    links = pool.links(link_edges(schedule.header, crossings))
    header, device = schedule.header, mesh.device
    training = header.mode == "train"
    shards = {
        stage: Shards.of(header, stage, mesh.group("pipeline", "tensor"), own.inputs or own.outputs, device)
        for stage, own in stages.items()
        if stage in header.vocabulary
    }
    transfers = Transfers({}, {}, {}, {}, shards)
    for (stage, following), specs in crossings.items():
        source, destination = header.stages[stage].rank, header.stages[following].rank
        grads = tuple(spec for spec in specs if spec.requires_grad)
        if stage in stages:
            transfers.send_activation[stage] = Sender(links[source, destination], specs)
            if training:
                back, slots = links[destination, source], header.gradient_slots[stage]
                transfers.receive_gradient[stage] = receive_slots(back, grads, slots, device)
        if following in stages:
            there, slots = links[source, destination], header.activation_slots[following]
            transfers.receive_activation[following] = receive_slots(there, specs, slots, device)
            if training:
                transfers.send_gradient[following] = Sender(links[destination, source], grads)
    return transfers


def link_edges(header: Header, crossings: Mapping[tuple[int, int], Specs]) -> list[Edge]:
    """Return the edges of a schedule's links, in the order in which they are connected.

    crossings: the tensors that cross between adjacent stages on different ranks.
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
    """Return the tensors that cross each boundary between ranks, by the two stages of the boundary."""
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
