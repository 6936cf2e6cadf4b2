"""Activations and gradients between stages: preallocated receive slots, posted receives, sends in flight."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.engine.stage import TensorSpec, described
from megapipe.parallel.links import FINISHED, LinkEnd, Loan, Transfer


@dataclass(frozen=True)
class Boundary:
    """What crosses one stage boundary in one direction, over which link."""

    link: LinkEnd
    specs: tuple[TensorSpec, ...]


class ReceiveSlots(ABC):
    """Receive buffers of one boundary. A slot is posted, awaited, and free again when the schedule reuses it."""

    @abstractmethod
    def post(self, slot: int) -> None:
        """Start receiving the next message of the link into `slot`."""

    @abstractmethod
    def take(self, slot: int) -> tuple[Tensor, ...]:
        """Wait for the message of `slot` and return its tensors, valid until the slot is posted again."""

    @abstractmethod
    def release(self) -> None:
        """Nothing that was taken is needed any more, and nothing is posted: engines take turns on a link's memory."""

    @abstractmethod
    def without_peer(self) -> "ReceiveSlots":
        """Slots in the same memory that receive nothing."""


def receive_slots(boundary: Boundary, num_slots: int, device: torch.device) -> ReceiveSlots:
    """Slots in the link's own memory where it lends that, else in buffers of this rank's."""
    return LentSlots(boundary, num_slots) if boundary.link.lends else BufferSlots(boundary, num_slots, device)


class BufferSlots(ReceiveSlots):
    """Slots that are buffers of this rank's."""

    def __init__(self, boundary: Boundary, num_slots: int, device: torch.device) -> None:
        self._link = boundary.link
        self._buffers = [tuple(spec.allocate(device) for spec in boundary.specs) for _ in range(num_slots)]
        self._pending: dict[int, list[Transfer]] = {}

    def post(self, slot: int) -> None:
        self._pending[slot] = [self._link.receive(buffer) for buffer in self._buffers[slot]]

    def take(self, slot: int) -> tuple[Tensor, ...]:
        for transfer in self._pending.pop(slot):
            transfer.wait()
        return self._buffers[slot]

    def release(self) -> None:
        """The buffers are this engine's alone."""

    def without_peer(self) -> ReceiveSlots:
        return NoiseSlots(self._buffers)


class LentSlots(ReceiveSlots):
    """Slots that are messages where they lie in the link's memory: nothing is copied."""

    def __init__(self, boundary: Boundary, num_slots: int) -> None:
        self._link = boundary.link
        self._num_slots = num_slots
        self._specs = [spec.allocate(torch.device("meta")) for spec in boundary.specs]
        self._loans: dict[int, list[Loan]] = {}

    def post(self, slot: int) -> None:
        for loan in self._loans.get(slot, ()):
            loan.give_back()
        self._loans[slot] = [self._link.borrow(spec) for spec in self._specs]

    def release(self) -> None:
        for loans in self._loans.values():
            for loan in loans:
                loan.give_back()
        self._loans.clear()

    def take(self, slot: int) -> tuple[Tensor, ...]:
        return tuple([loan.take() for loan in self._loans[slot]])

    def without_peer(self) -> ReceiveSlots:
        """Slots in memory of their own: the link lends its memory for messages alone."""
        return NoiseSlots(
            [tuple(torch.empty_like(spec, device="cpu") for spec in self._specs) for _ in range(self._num_slots)]
        )


class NoiseSlots(ReceiveSlots):
    """Slots that are filled with random numbers, for which experts are as busy as for activations; integers are 0."""

    def __init__(self, buffers: Sequence[tuple[Tensor, ...]]) -> None:
        self._buffers = buffers

    def post(self, slot: int) -> None:
        """Nothing is on its way."""

    def take(self, slot: int) -> tuple[Tensor, ...]:
        """Fill the slot's buffers and return them."""
        with torch.no_grad():
            for buffer in self._buffers[slot]:
                if buffer.is_floating_point():
                    buffer.uniform_(-1.0, 1.0)  # of torch's generator, which decides nothing in a run
                else:
                    buffer.zero_()
        return self._buffers[slot]

    def release(self) -> None:
        """The buffers belong to others."""

    def without_peer(self) -> ReceiveSlots:
        return self


class Sender:
    """Sends over one boundary.

    At most as many are in flight as the link has slots, so that a rank that runs ahead does not keep all it has sent.
    Waiting for the oldest cannot hang: schedules are proved free of deadlock where every send waits for its receive.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._link = boundary.link
        self._specs = boundary.specs
        self._agreed = [(torch.Size(spec.shape), spec.dtype) for spec in boundary.specs]
        self._in_flight: deque[tuple[Transfer, Tensor]] = deque()

    def send(self, tensors: tuple[Tensor, ...]) -> None:
        """Start sending; each tensor is kept alive until it has left.

        Raises ValueError for other tensors than the receiver expects: its memory has their shapes and types.
        """
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != self._agreed:
            raise ValueError(
                f"the stage returned {described(tensors)}, but declared {described(self._specs)} when it was built; "
                "its forward must always return the same shapes and types (under autocast: convert its result)"
            )
        for tensor in tensors:
            transfer = self._link.send(tensor)
            if transfer is not FINISHED:
                self._in_flight.append((transfer, tensor.detach()))
        while len(self._in_flight) > self._link.edge.slots:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        transfer, _ = self._in_flight.popleft()
        transfer.wait()

    def without_peer(self) -> "Sender":
        """A sender that drops everything."""
        return _Dropping(Boundary(self._link, self._specs))


class _Dropping(Sender):
    def send(self, tensors: tuple[Tensor, ...]) -> None:
        """Nobody receives them; they are kept for as long as messages are."""
        self._in_flight += ((FINISHED, tensor.detach()) for tensor in tensors)
        while len(self._in_flight) > self._link.edge.slots:
            self._finish_oldest()


class Transfers:
    """All boundaries of one rank.

    receive_*[stage], send_*[stage]: present where the neighbour stage lives on another rank.
    """

    def __init__(
        self,
        receive_activation: dict[int, ReceiveSlots],
        receive_gradient: dict[int, ReceiveSlots],
        send_activation: dict[int, Sender],
        send_gradient: dict[int, Sender],
    ) -> None:
        self.receive_activation = receive_activation
        self.receive_gradient = receive_gradient
        self.send_activation = send_activation
        self.send_gradient = send_gradient

    def drain(self) -> None:
        """End of a section: nothing of this rank is in flight any more."""
        for sender in (*self.send_activation.values(), *self.send_gradient.values()):
            sender.drain()
        for slots in (*self.receive_activation.values(), *self.receive_gradient.values()):
            slots.release()

    def without_peers(self) -> "Transfers":
        """The same boundaries, over which nothing is sent and noise is received."""
        return Transfers(
            {stage: slots.without_peer() for stage, slots in self.receive_activation.items()},
            {stage: slots.without_peer() for stage, slots in self.receive_gradient.items()},
            {stage: sender.without_peer() for stage, sender in self.send_activation.items()},
            {stage: sender.without_peer() for stage, sender in self.send_gradient.items()},
        )
