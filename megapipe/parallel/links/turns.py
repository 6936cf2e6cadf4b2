"""Waiting for one link of shared memory while the messages of the others are moved."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

Found = TypeVar("Found")

_LIVENESS_SECONDS = 0.1
"""How often a wait looks whether its peer is still there."""
_TURN_SECONDS = 0.001
"""How often a wait looks after other links that have more messages under way than slots."""


class SharedMemoryEnd(Protocol):
    """One end of a link of shared memory."""

    timeout: float

    @property
    def is_short_of_slots(self) -> bool:
        """More messages are under way than there are slots, so that one of the two ends may be waiting for one."""

    def deliver(self) -> None:
        """Move what can be moved without waiting."""

    def peer_has_ended(self) -> bool:
        """Whether the other end's process is gone."""


class Links:
    """The links of shared memory of one rank: whoever waits for any of them moves the messages of all."""

    def __init__(self) -> None:
        self._all: list[SharedMemoryEnd] = []

    def add(self, link: SharedMemoryEnd) -> None:
        """From now on every wait looks after `link`."""
        self._all.append(link)

    def remove(self, link: SharedMemoryEnd) -> None:
        """`link` is closed."""
        self._all.remove(link)

    def wait(self, take: Callable[[float], Found | None], link: SharedMemoryEnd) -> Found | None:
        """What `take` finds, None once `link`'s peer has ended or its time is over.

        take: waits up to so many seconds.
        """
        deadline = time.monotonic() + link.timeout
        ended = False
        while not ended:
            remaining = deadline - time.monotonic()
            short = [each for each in self._all if each is not link and each.is_short_of_slots]
            for each in short:
                each.deliver()
            found = take(max(0.0, min(remaining, _TURN_SECONDS if short else _LIVENESS_SECONDS)))
            if found is not None:
                return found
            ended = remaining <= 0.0 or link.peer_has_ended()
        return take(0.0)  # what the peer sent last may have come in between
