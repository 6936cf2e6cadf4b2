"""A copy of a rank's share of the state in host memory, to be written while training changes the state."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megapipe.checkpoint.save import Content

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element size."""


class Snapshot:
    """Host memory that is allocated once and holds one copy at a time: the only extra memory of a background save.

    pinned: page-locked, so that a GPU copies into it by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on to."""
        return self._memory.numel()

    def take(self, contents: Sequence[Content]) -> list[Content]:
        """The same contents with copied elements, complete on return. It overwrites the copy before it."""
        starts, end = [], 0
        for content in contents:
            starts.append(end)
            end += -(-content.tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            # The old memory goes first, so that there never are two.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=self._pinned)
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
