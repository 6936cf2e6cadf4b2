"""How two processes of one host come to share a link's memory without leaving anything behind.

The source makes an anonymous memory file and passes its descriptor over a Unix socket of the abstract namespace.
Neither has a name in a file system, so nothing is left however the processes end, and the size of /dev/shm does not
matter.
"""

import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.groups import Group
from megapipe.parallel.links.link import Edge, LinkEnd
from megapipe.parallel.links.ring import RingBuffer, RingShape
from megapipe.parallel.links.shared_memory import Links, SharedMemoryReceiver, SharedMemorySender

_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # process, user and group id, as Linux returns them for SO_PEERCRED


def host_identity() -> tuple[str, str]:
    """What two processes have in common exactly when shared-memory links work between them: kernel and namespace.

    Two empty strings where the system is not Linux, and then no two processes can.
    """
    if sys.platform != "linux":
        return "", ""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/net")


def shared_memory_links(group: Group, edges: Sequence[Edge], timeout: float) -> dict[Edge, LinkEnd]:
    """This rank's ends of `edges`. A collective call over the pipeline's group, whose ranks are on one host.

    Raises:
        CommunicationError: a source did not connect within `timeout` seconds.
        OSError: the host has no memory left for the slots.
    """
    mine = Links()
    links: dict[Edge, LinkEnd] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = f"\0megapipe-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(len(edges))
        addresses = group.all_gather_object(address)
        # Connecting needs no answer, so all ranks first connect what they send on, then accept what they receive on.
        for index, edge in enumerate(edges):
            if edge.source == group.rank:
                connection, ring = _connect(addresses[edge.destination], index, edge)
                links[edge] = SharedMemorySender(edge, group, timeout, connection, ring, mine)
        links |= _accept_all(listener, group, edges, timeout, mine)
    return links


def _accept_all(
    listener: socket.socket, group: Group, edges: Sequence[Edge], timeout: float, mine: Links
) -> dict[Edge, LinkEnd]:
    """The receiving ends, once every source has connected."""
    links: dict[Edge, LinkEnd] = {}
    expected = {index: edge for index, edge in enumerate(edges) if edge.destination == group.rank}
    deadline = time.monotonic() + timeout
    while expected:
        if not select.select([listener], [], [], max(0.0, deadline - time.monotonic()))[0]:
            missing = ", ".join(f"rank {group.ranks[edge.source]} ({edge})" for edge in expected.values())
            raise CommunicationError(f"rank {group.global_rank} waited {timeout:g} s for the memory of {missing}")
        connection, _ = listener.accept()
        if _is_same_user(connection):
            connection.settimeout(timeout)
            index, ring = _take_memory(connection, edges)
            edge = expected.pop(index)
            links[edge] = SharedMemoryReceiver(edge, group, timeout, connection, ring, mine)
        else:
            connection.close()
    return links


def _connect(address: str, index: int, edge: Edge) -> tuple[socket.socket, RingBuffer]:
    """Connect to the destination, make the memory and pass it on."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    memory = os.memfd_create(f"megapipe {edge}", os.MFD_CLOEXEC)
    try:
        shape = _shape(edge)
        os.posix_fallocate(memory, 0, shape.total_bytes)
        ring = RingBuffer(memory, shape)
        ring.initialize()
        socket.send_fds(connection, [_HELLO.pack(index)], [memory])
        return connection, ring
    finally:
        os.close(memory)


def _is_same_user(connection: socket.socket) -> bool:
    """Abstract sockets have no permissions, so the kernel is asked who is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _take_memory(connection: socket.socket, edges: Sequence[Edge]) -> tuple[int, RingBuffer]:
    """The index of the edge that a source has connected for, and its memory."""
    hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(hello) < _HELLO.size:
        raise CommunicationError("a source of a shared-memory link ended while it connected")
    (index,) = _HELLO.unpack(hello)
    try:
        return index, RingBuffer(descriptors[0], _shape(edges[index]))
    finally:
        os.close(descriptors[0])


def _shape(edge: Edge) -> RingShape:
    return RingShape.of(edge.slots + edge.loans, edge.maximum_bytes)
