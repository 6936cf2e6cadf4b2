"""Waiting on many sockets at once, so that whoever waits for one link moves the messages of all."""

import select
import socket
import time
from collections.abc import Callable


class Poller:
    """The sockets of one rank's shared-memory links, each with what to do when it can be read."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def register(self, sock: socket.socket, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `sock` can be read or its peer is gone."""
        self._handlers[sock.fileno()] = handler
        self._poll.register(sock, select.POLLIN)

    def unregister(self, sock: socket.socket) -> None:
        """Forget `sock`; nothing to do where that has happened already."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            self._poll.unregister(sock)

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Sleep in the kernel and handle what comes until `ready()`; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not ready():
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                return False
            for descriptor, _ in events:
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    handler()
        return True
