"""Messages between all pairs of a group whose members share memory: what gathers and reductions by parts are made of.

gloo carries them through sockets even on one host. Here a message is copied into memory of both and out of it again.
"""

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from megapipe.parallel.groups import DistributedGroup
from megapipe.parallel.links.link import Edge, LinkEnd, Transfer
from megapipe.parallel.links.shared_memory import SharedMemoryReceiver, SharedMemorySender
from megapipe.parallel.links.shared_memory_setup import host_identity, shared_memory_links

CHUNK_BYTES = 1 << 19
"""Longer messages go in chunks of this size; a shorter end goes as it is."""
SLOTS = 16
"""Chunks that may be under way to a peer at a time."""


class SharedMemoryExchange:
    """Links between all pairs of a group.

    Starting an exchange never waits: chunks that find no room leave when this rank waits for an exchange. So a member
    may wait until its peers wait for the same one, which cannot hang where all start and await in one order.

    Args:
        timeout: seconds that a wait gives a peer.
    """

    def __init__(self, group: DistributedGroup, timeout: float) -> None:
        pairs = [(source, to) for source in range(group.size) for to in range(group.size) if source != to]
        edges = [Edge(source, to, CHUNK_BYTES, SLOTS) for source, to in pairs]
        links = list(shared_memory_links(group, edges, timeout).values())
        self._outgoing = {end.edge.destination: end for end in links if isinstance(end, SharedMemorySender)}
        self._incoming = {end.edge.source: end for end in links if isinstance(end, SharedMemoryReceiver)}
        weakref.finalize(self, _close, links)

    @classmethod
    def within_host(cls, group: DistributedGroup, timeout: float) -> "SharedMemoryExchange | None":
        """None where members are on several hosts, or the host is not Linux. A collective call."""
        hosts = set(group.all_gather_object(host_identity()))
        return cls(group, timeout) if len(hosts) == 1 and ("", "") not in hosts else None

    def start(self, peers: Sequence[int], pieces: Sequence[Tensor], received: Sequence[Tensor]) -> list[Transfer]:
        """Send to every peer its piece, and post the receive of what it sends here; both are flat, by group rank.

        Returns what to wait for before `received` may be read and `pieces` overwritten.
        """
        receives = [self._incoming[peer].receive(chunk) for peer in peers for chunk in _chunks(received[peer])]
        return receives + [self._outgoing[peer].enqueue(chunk) for peer in peers for chunk in _chunks(pieces[peer])]


def _chunks(message: Tensor) -> Sequence[Tensor]:
    return message.split(CHUNK_BYTES // message.element_size())


def _close(links: Iterable[LinkEnd]) -> None:
    for link in links:
        link.close()
