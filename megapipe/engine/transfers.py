"""Activations and gradients between stages: preallocated receive slots, posted receives, sends in flight."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.engine.stage import TensorSpec
from megapipe.parallel.links import Link, Transfer


@dataclass(frozen=True)
class Boundary:
    """What arrives at this rank over one stage boundary."""

    link: Link
    specs: tuple[TensorSpec, ...]


class ReceiveSlots:
    """Receive buffers of one boundary. A slot is posted, awaited, and free again when the schedule reuses it."""

    def __init__(self, boundary: Boundary, num_slots: int, device: torch.device) -> None:
        self._link = boundary.link
        self._buffers = [tuple(spec.allocate(device) for spec in boundary.specs) for _ in range(num_slots)]
        self._pending: dict[int, list[Transfer]] = {}

    def post(self, slot: int) -> None:
        """Start receiving the next message of the link into `slot`."""
        self._pending[slot] = [self._link.receive(buffer) for buffer in self._buffers[slot]]

    def take(self, slot: int) -> tuple[Tensor, ...]:
        """Wait for the message of `slot` and return its buffers, valid until the slot is posted again."""
        for transfer in self._pending.pop(slot):
            transfer.wait()
        return self._buffers[slot]


class Sender:
    """Sends over one boundary; each keeps its tensors alive until it has completed.

    At most as many are in flight as the link has slots, so that a rank that runs ahead does not keep all it has sent.
    Waiting for the oldest cannot hang: schedules are proved free of deadlock where every send waits for its receive.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._in_flight: deque[tuple[Transfer, Tensor]] = deque()

    def send(self, tensors: tuple[Tensor, ...]) -> None:
        """Start sending."""
        for tensor in tensors:
            payload = tensor.detach().contiguous()
            self._in_flight.append((self._link.send(payload), payload))
        while len(self._in_flight) > self._link.edge.slots:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        transfer, _ = self._in_flight.popleft()
        transfer.wait()


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
