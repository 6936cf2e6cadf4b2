"""Links through memory that two processes of one host share.

A message is copied into a free slot and announced; the receiver copies it out, or reads it where it lies. Nobody
spins: a wait sleeps on the link's semaphore. Every link also has a socket that carries nothing: a peer that has ended
is the end of its stream.
"""

import ctypes
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.groups import Group
from megapipe.parallel.links.link import FINISHED, Edge, Link, Loan, Transfer
from megapipe.parallel.links.ring import Ring

Found = TypeVar("Found")

_copy_memory = ctypes.CDLL(None).memmove
_copy_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_memory.restype = ctypes.c_void_p

_LIVENESS_SECONDS = 0.1
"""How often a wait looks whether its peer is still there."""
_TURN_SECONDS = 0.001
"""How often a wait looks after other links whose slots are too few for the receives posted on them."""


class Links:
    """The shared-memory links of one rank that receive: whoever waits for any link moves the messages of all."""

    def __init__(self) -> None:
        self._receivers: list[SharedMemoryReceiver] = []

    def add(self, receiver: "SharedMemoryReceiver") -> None:
        self._receivers.append(receiver)

    def remove(self, receiver: "SharedMemoryReceiver") -> None:
        self._receivers.remove(receiver)

    def wait(self, take: Callable[[float], Found | None], link: "SharedMemoryLink") -> Found | None:
        """What `take` finds, None once `link`'s peer has ended or its time is over.

        take: waits up to so many seconds.
        """
        deadline = time.monotonic() + link.timeout
        ended = False
        while not ended:
            remaining = deadline - time.monotonic()
            short = [receiver for receiver in self._receivers if receiver is not link and receiver.is_short_of_slots]
            found = take(max(0.0, min(remaining, _TURN_SECONDS if short else _LIVENESS_SECONDS)))
            if found is not None:
                return found
            for receiver in short:
                receiver.deliver()
            ended = remaining <= 0.0 or link.peer_has_ended()
        return take(0.0)  # what the peer sent last may have come in between


class SharedMemoryLink(Link):
    """What both ends have in common.

    Args:
        connection: socket to the other end.
        links: the receiving ends of this rank.
    """

    def __init__(
        self, edge: Edge, group: Group, timeout: float, connection: socket.socket, ring: Ring, links: Links
    ) -> None:
        super().__init__(edge, group, timeout)
        connection.setblocking(False)
        self._connection = connection
        self._ring = ring
        self._links = links
        self._views: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def close(self) -> None:
        self._connection.close()
        # The mapping goes with its last tensor.
        self._views.clear()
        del self._ring

    def peer_has_ended(self) -> bool:
        """Whether the other end's process is gone."""
        readable, _, _ = select.select([self._connection], [], [], 0.0)
        return bool(readable)

    def _slots_like(self, tensor: Tensor) -> list[Tensor]:
        """The starts of all slots, seen with the shape and type of a tensor that fits; made once."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._views:
            self.check_size(tensor)
            starts = self._ring.slots[:, : tensor.nbytes]
            self._views[key] = [start.view(tensor.dtype).view(tensor.shape) for start in starts]
        return self._views[key]

    def _no_answer(self, number: int) -> CommunicationError:
        if self.peer_has_ended():
            return self.failure(number, f"rank {self.peer} has ended")
        return self.failure(number, f"there was no answer within {self.timeout:g} s")


class SharedMemorySender(SharedMemoryLink):
    """The sending end. A send copies into a free slot and is over; it waits only while all slots are full."""

    _sent = 0

    def send(self, tensor: Tensor) -> Transfer:
        num_bytes = tensor.nbytes
        self.check_size(tensor)
        slot = self._ring.take_free()
        if slot is None:
            slot = self._links.wait(self._ring.take_free, self)
            if slot is None:
                raise self._no_answer(self._sent - len(self._ring.slots))
        if tensor.is_contiguous():
            # Measured a quarter faster than torch's copy, which reads the slot's cache lines before it writes them.
            _copy_memory(self._ring.addresses[slot], tensor.data_ptr(), num_bytes)
        else:
            self._slots_like(tensor)[slot].copy_(tensor.detach())
        self._ring.announce(slot, num_bytes)
        self._sent += 1
        return FINISHED


class SharedMemoryReceiver(SharedMemoryLink):
    """The receiving end. Messages are taken when a receive is posted or awaited, and where slots are few also while
    this rank waits for another link."""

    lends = True

    def __init__(
        self, edge: Edge, group: Group, timeout: float, connection: socket.socket, ring: Ring, links: Links
    ) -> None:
        super().__init__(edge, group, timeout, connection, ring, links)
        self._posted: deque[_Receive | _Borrowed] = deque()
        self._started = 0
        self._on_loan = 0
        links.add(self)

    @property
    def is_short_of_slots(self) -> bool:
        """More receives are posted than the sender has slots for: it may be waiting for one."""
        return len(self._posted) > len(self._ring.slots) - self._on_loan

    def close(self) -> None:
        self._links.remove(self)
        super().close()

    def receive(self, into: Tensor) -> Transfer:
        self.check_buffer(into)
        transfer = _Receive(self, self._number(), into.detach())
        self._posted.append(transfer)
        self.deliver()
        return transfer

    def borrow(self, like: Tensor) -> Loan:
        loan = _Borrowed(self, self._number(), self._slots_like(like), like.nbytes)
        self._posted.append(loan)
        return loan

    def deliver(self) -> None:
        """Give what has arrived to posted receives."""
        while self._posted and (message := self._ring.take_message()):
            self._complete(*message)

    def wait_for(self, receive: "_Receive | _Borrowed") -> None:
        """Return once `receive` has its message."""
        while not receive.finished:
            message = self._ring.take_message() or self._links.wait(self._ring.take_message, self)
            if message is None:
                raise self._no_answer(receive.number)
            self._complete(*message)

    def copy_out(self, slot: int, into: Tensor) -> None:
        """Copy a slot that was not lent, and free it."""
        into.copy_(self._slots_like(into)[slot])
        self._ring.hand_back(slot)

    def take_back(self, slot: int) -> None:
        """Free a slot that was lent."""
        self._on_loan -= 1
        self._ring.hand_back(slot)

    def _number(self) -> int:
        self._started += 1
        return self._started - 1

    def _complete(self, slot: int, num_bytes: int) -> None:
        receive = self._posted.popleft()
        if num_bytes != receive.num_bytes:
            raise self.failure(receive.number, f"{num_bytes} bytes were sent and {receive.num_bytes} expected")
        if isinstance(receive, _Borrowed):
            self._on_loan += 1
        receive.complete(slot)


class _Receive(Transfer):
    """A receive into a tensor of the caller's."""

    def __init__(self, link: SharedMemoryReceiver, number: int, into: Tensor) -> None:
        self._link = link
        self._into = into
        self.number = number
        self.num_bytes = into.nbytes
        self.finished = False

    def complete(self, slot: int) -> None:
        self._link.copy_out(slot, self._into)
        self.finished = True

    def wait(self) -> None:
        if not self.finished:
            self._link.wait_for(self)


class _Borrowed(Loan):
    """A receive that is read where it lies."""

    def __init__(self, link: SharedMemoryReceiver, number: int, slots: list[Tensor], num_bytes: int) -> None:
        self._link = link
        self._slots = slots
        self._slot: int | None = None
        self.number = number
        self.num_bytes = num_bytes
        self.finished = False

    def complete(self, slot: int) -> None:
        self._slot = slot
        self.finished = True

    def take(self) -> Tensor:
        if self._slot is None:
            self._link.wait_for(self)
        assert self._slot is not None  # wait_for has completed it or raised
        return self._slots[self._slot]

    def give_back(self) -> None:
        if self._slot is None:
            raise ValueError(f"message {self.number} of {self._link.edge} was not taken, or given back already")
        self._link.take_back(self._slot)
        self._slot = None
