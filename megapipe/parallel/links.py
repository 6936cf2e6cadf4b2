"""Links: ordered point-to-point transfer of tensors, one for each ordered pair of pipeline ranks.

Every link has one direction. Messages stay in order, and nothing is negotiated per message.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from megapipe.layout.costs import MESSAGES_IN_FLIGHT
from megapipe.parallel.groups import CommunicationError, Group, Work


@dataclass(frozen=True)
class Edge:
    """Description of a link, which carries all messages from one rank to another, in order.

    Attributes:
        source, destination: pipeline coordinates of its two ends.
        maximum_bytes: size of the largest tensor that it will carry.
        slots: messages that shared memory holds before a send waits for a receive.
        loans: additional slots, for messages that the receiver keeps in place.
    """

    source: int
    destination: int
    maximum_bytes: int
    slots: int = MESSAGES_IN_FLIGHT
    loans: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        """Source and destination."""
        return self.source, self.destination

    def serves(self, other: "Edge") -> bool:
        """Return whether a link that was created for this edge can carry the messages of `other`."""
        return (
            self.pair == other.pair
            and self.maximum_bytes >= other.maximum_bytes
            and self.slots >= other.slots
            and self.loans >= other.loans
        )

    def __str__(self) -> str:
        return f"link {self.source}->{self.destination}"


class Loan(ABC):
    """A receive that was started into the link's own memory."""

    @abstractmethod
    def take(self) -> Tensor:
        """Wait for the message and return it. The tensor is valid until `give_back`, also in graphs that saved it.

        Raises:
            CommunicationError: the peer died, did not answer, or sent something other than expected.
        """

    @abstractmethod
    def give_back(self) -> None:
        """Let the sender reuse that memory. Call this once for each loan, after `take`."""


class LinkEnd:
    """One end of an edge. The sending end has `send`, the receiving end `receive`; messages arrive in order.

    Only one thread uses a link. Starting a send or a receive does not wait for the peer, with two exceptions: a send
    over shared memory if all slots are full, and the first use of an NCCL communicator in each direction, which
    `make_links` therefore performs itself.

    Args:
        edge: the link's edge.
        group: the pipeline's group, from the view of this end.
        timeout: seconds that a wait gives the peer.

    Attributes:
        lends: whether this end has `borrow`, as the receiving end of shared memory does.
    """

    lends = False

    def __init__(self, edge: Edge, group: Group, timeout: float) -> None:
        self.edge = edge
        self._sends = group.rank == edge.source
        self.rank = group.global_rank
        self.peer = group.ranks[edge.destination if self._sends else edge.source]
        self.timeout = timeout
        self._numbers = itertools.count()

    def send(self, tensor: Tensor) -> Work:
        """Start sending `tensor`, which must not change before the transfer is awaited.

        Raises:
            ValueError: the tensor is larger than the link's maximum.
            CommunicationError: the peer died or did not answer.
        """
        if not self._sends:
            raise ValueError(f"rank {self.rank} is the receiving end of {self.edge} and cannot send on it")
        self.check_size(tensor)
        return self._start(tensor)

    def receive(self, into: Tensor) -> Work:
        """Start receiving the link's next message into the contiguous tensor `into`.

        Raises:
            ValueError: the tensor is not contiguous.
        """
        if self._sends:
            raise ValueError(f"rank {self.rank} is the sending end of {self.edge} and cannot receive on it")
        if not into.is_contiguous():
            raise ValueError(f"{self.edge} receives into contiguous tensors, not strides {into.stride()}")
        return self._start(into)

    def _start(self, tensor: Tensor) -> Work:
        """Start to send or receive a checked tensor, depending on the end. Every kind of link overrides this."""
        raise NotImplementedError

    def borrow(self, like: Tensor) -> Loan:
        """Start receiving the next message in the link's own memory, which saves a copy.

        At most `edge.loans` messages may be on loan at a time; otherwise the sender runs out of slots.

        Args:
            like: has the message's shape and dtype; it may be on the meta device.
        """
        raise ValueError(f"{self.edge} does not lend memory to rank {self.rank}: give it a tensor to receive into")

    def close(self) -> None:
        """Release the link's resources outside torch. The peer may still receive messages that were sent."""

    def check_size(self, tensor: Tensor) -> None:
        """Raise ValueError for a tensor that is too large for the link."""
        if tensor.nbytes > self.edge.maximum_bytes:
            raise ValueError(
                f"a {tuple(tensor.shape)} {tensor.dtype} tensor has {tensor.nbytes} bytes, "
                f"but {self.edge} was made for at most {self.edge.maximum_bytes}: raise maximum_bytes"
            )

    def waiting(self, number: int) -> str:
        """Return the start of an error about message `number`: which rank waited for whom."""
        verb = "take" if self._sends else "send"
        return f"rank {self.rank} waited for rank {self.peer} to {verb} message {number} of {self.edge}"

    def failure(self, number: int, reason: str) -> CommunicationError:
        """Return the error for message `number`."""
        return CommunicationError(f"{self.waiting(number)}, but {reason}")
