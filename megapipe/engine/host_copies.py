"""Copies between a device and host memory that run beside the compute, and the host memory that they fill."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

Move = tuple[Tensor, Tensor]
"""(target, source): two tensors of one shape and dtype, one of them in host memory."""


class Copy(ABC):
    """Copies that were started together."""

    @abstractmethod
    def wait(self) -> None:
        """Let what the caller computes from here on come behind the copies: a GPU's stream waits, a CPU's thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until the copies are done."""


class CopyStream(ABC):
    """One direction: copies are made in the order they were started in, each behind all that was computed before."""

    @abstractmethod
    def start(self, moves: Sequence[Move]) -> Copy:
        """Start copying. Neither side may be changed or freed before the copy has been waited for."""


class HostPool:
    """Buffers of host memory, used again by size; page-locked where a GPU copies, as it can do nothing beside else.

    Attributes:
        num_bytes: of all buffers that were made.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """A buffer, uint8 [num_bytes], of any content."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be taken again; copies out of it are waited for, copies into it come behind them."""
        self._free[buffer.numel()].append(buffer)


class ThreadCopies(CopyStream):
    """Copies of a CPU's tensors on a thread of their own: what a GPU's copy engine is to it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"megapipe {self._name}")

    def start(self, moves: Sequence[Move]) -> Copy:
        return _ThreadCopy(self._thread.submit(self.copy, moves))

    def copy(self, moves: Sequence[Move]) -> None:
        """Make the copies; runs on the thread."""
        for target, source in moves:
            target.copy_(source)


class _ThreadCopy(Copy):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def synchronize(self) -> None:
        self._future.result()


class DeviceCopies(CopyStream):
    """Copies of a GPU's tensors on a stream of their own.

    No tensor is recorded on it: whoever started a copy holds both sides until the compute stream has waited for it,
    so that memory is used again only behind the copy, and at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def start(self, moves: Sequence[Move]) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in moves:
                target.copy_(source, non_blocking=True)
        return _DeviceCopy(self._stream.record_event(), self._device)


class _DeviceCopy(Copy):
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()


def copy_stream(device: torch.device, name: str) -> CopyStream:
    """One direction's copies of a device. name: of its thread on a CPU."""
    return DeviceCopies(device) if device.type == "cuda" else ThreadCopies(name)
