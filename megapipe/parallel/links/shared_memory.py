"""Links through memory that two processes of one host share, with a socket to signal.

A message is copied into a slot and announced by its size on the socket; the receiver copies it out and sends one byte
of credit back. Nobody spins: waits sleep on the sockets, and a dead peer is the end of its socket's stream, seen at
once.
"""

import socket
import struct
from abc import abstractmethod
from collections import deque

from torch import Tensor

from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.groups import Group
from megapipe.parallel.links.link import Edge, Finished, Link, Transfer
from megapipe.parallel.links.poller import Poller

_SIZE = struct.Struct("<Q")
_CREDIT = b"\x01"
_READ_BYTES = 4096


class SharedMemoryLink(Link):
    """What both ends have in common.

    Args:
        connection: socket to the other end.
        slots: (edge.slots, at least edge.maximum_bytes) uint8, memory shared with the other end.
        poller: the one that all links of this rank share.
    """

    def __init__(
        self, edge: Edge, group: Group, timeout: float, connection: socket.socket, slots: Tensor, poller: Poller
    ) -> None:
        super().__init__(edge, group, timeout)
        connection.setblocking(False)
        self._connection = connection
        self._slots = slots
        self._poller = poller
        self._peer_gone = False
        poller.register(connection, self._on_readable)

    def close(self) -> None:
        self._poller.unregister(self._connection)
        self._connection.close()
        # The mapping goes with its last tensor.
        self._slots = self._slots.new_empty(0)

    def _read(self) -> bytes:
        """What the peer has written. Notes the end of the stream, which comes after everything that was written."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            data = b""
        if not data:
            self._peer_gone = True
            self._poller.unregister(self._connection)
        return data

    @abstractmethod
    def _on_readable(self) -> None:
        """The socket has bytes or its end."""

    def _no_answer(self, number: int) -> CommunicationError:
        if self._peer_gone:
            return self.failure(number, f"rank {self.peer} has ended")
        return self.failure(number, f"there was no answer within {self.timeout:g} s")


class SharedMemorySender(SharedMemoryLink):
    """The sending end. A send copies into a free slot and is over; it waits only while all slots are full."""

    _sent = 0
    _taken = 0

    def send(self, tensor: Tensor) -> Transfer:
        self.check_size(tensor)
        number = self._sent
        if not self._has_free_slot():
            self._poller.wait_until(lambda: self._has_free_slot() or self._peer_gone, self.timeout)
            if not self._has_free_slot():
                raise self._no_answer(number - self.edge.slots)
        _as(self._slots[number % self.edge.slots], tensor).copy_(tensor.detach())
        try:
            self._connection.sendall(_SIZE.pack(tensor.nbytes))
        except (BrokenPipeError, ConnectionResetError) as error:
            self._peer_gone = True
            raise self._no_answer(number) from error
        self._sent += 1
        return Finished()

    def _has_free_slot(self) -> bool:
        return self._sent - self._taken < self.edge.slots

    def _on_readable(self) -> None:
        self._taken += len(self._read())


class SharedMemoryReceiver(SharedMemoryLink):
    """The receiving end. A posted receive is filled whenever this rank waits for anything on any of its links."""

    def __init__(
        self, edge: Edge, group: Group, timeout: float, connection: socket.socket, slots: Tensor, poller: Poller
    ) -> None:
        super().__init__(edge, group, timeout, connection, slots, poller)
        self._unread = b""
        self._arrived: deque[int] = deque()
        self._posted: deque[_Receive] = deque()
        self._started = 0
        self._copied = 0

    def receive(self, into: Tensor) -> Transfer:
        self.check_buffer(into)
        transfer = _Receive(self, self._started, into.detach())
        self._started += 1
        self._posted.append(transfer)
        self._deliver()
        return transfer

    def wait_for(self, transfer: "_Receive") -> None:
        """Return once `transfer` is filled."""
        if not self._poller.wait_until(lambda: transfer.finished or self._peer_gone, self.timeout):
            raise self._no_answer(transfer.number)
        if not transfer.finished:
            raise self._no_answer(transfer.number)

    def _on_readable(self) -> None:
        self._unread += self._read()
        whole = len(self._unread) // _SIZE.size * _SIZE.size
        self._arrived.extend(size for (size,) in _SIZE.iter_unpack(self._unread[:whole]))
        self._unread = self._unread[whole:]
        self._deliver()

    def _deliver(self) -> None:
        """Copy arrived messages into posted buffers, in order, and give their slots back."""
        while self._posted and self._arrived:
            transfer, num_bytes = self._posted.popleft(), self._arrived.popleft()
            if num_bytes != transfer.into.nbytes:
                raise self.failure(transfer.number, f"{num_bytes} bytes were sent and {transfer.into.nbytes} expected")
            transfer.into.copy_(_as(self._slots[self._copied % self.edge.slots], transfer.into))
            self._copied += 1
            transfer.finished = True
            self._give_credit()

    def _give_credit(self) -> None:
        try:
            self._connection.sendall(_CREDIT)
        except (BrokenPipeError, ConnectionResetError):
            # The sender has sent all it had and left; nobody needs the slot any more.
            return


class _Receive(Transfer):
    def __init__(self, link: SharedMemoryReceiver, number: int, into: Tensor) -> None:
        self._link = link
        self.number = number
        self.into = into
        self.finished = False

    def wait(self) -> None:
        if not self.finished:
            self._link.wait_for(self)


def _as(slot: Tensor, like: Tensor) -> Tensor:
    """The start of a slot, seen with the type and shape of `like`."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)
