"""A copy of a rank's part of the state in host memory, which is written while training changes the state."""

import contextlib
import mmap
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megapipe.checkpoint.save_and_load import Content

_ALIGNMENT = 64
"""Bytes of a cache line, a multiple of every element size."""

_TOUCHED_AT_ONCE = 1 << 26
"""Bytes whose pages one operation touches, few enough that torch stays in the calling thread."""


class Snapshot:
    """Host memory that is allocated once and contains one copy at a time: the only additional memory of a background
    save.

    pinned: whether the memory is page-locked, so that a GPU copies into it asynchronously.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._allocation: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Number of allocated bytes."""
        return self._memory.numel()

    def prepare(self, contents: Sequence[Content]) -> None:
        """Allocate the memory for these contents in the background. `take` waits for it.

        The first touch of its pages takes several times as long as a copy.
        """
        self.settle()
        _, num_bytes = _places(contents)
        if num_bytes > self.num_bytes:
            self._allocation = threading.Thread(
                target=self._allocate_or_leave, args=(num_bytes,), name="memory for checkpoints", daemon=True
            )
            self._allocation.start()

    def settle(self) -> None:
        """Wait until the allocation in the background has finished."""
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def take(self, contents: Sequence[Content]) -> list[Content]:
        """Return `contents` with copied elements; the copy is complete on return. Overwrites the previous copy."""
        self.settle()
        starts, end = _places(contents)
        if end > self.num_bytes:
            self._allocate(end)
        copies = [self._copy(content, start) for content, start in zip(contents, starts, strict=True)]
        for device in {content.tensor.values.device for content in contents}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return copies

    def _copy(self, content: Content, start: int) -> Content:
        values = content.tensor.values
        place: Tensor = self._memory[start : start + content.tensor.num_bytes].view(values.dtype)
        place.copy_(values.detach(), non_blocking=self._pinned)
        return replace(content, tensor=replace(content.tensor, values=place))

    def _allocate(self, num_bytes: int) -> None:
        # The old memory is freed first, so that there are never two copies.
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory = (
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) if self._pinned else _pages(num_bytes)
        )

    def _allocate_or_leave(self, num_bytes: int) -> None:
        """Allocate in the thread. If there is too little memory, `take` tries again and raises the error."""
        with contextlib.suppress(MemoryError, OSError, RuntimeError):
            self._allocate(num_bytes)
        for part in self._memory.split(_TOUCHED_AT_ONCE):
            part[:: mmap.PAGESIZE].zero_()


def _places(contents: Sequence[Content]) -> tuple[list[int], int]:
    """Return the offset of each content, and the total number of bytes."""
    starts, end = [], 0
    for content in contents:
        starts.append(end)
        end += -(-content.tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _pages(num_bytes: int) -> Tensor:
    """Return host memory in huge pages if the system has them: the first touch then causes fewer page faults."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not on Linux
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel was built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
