"""Memory of a rank's device: tensors whose memory is freed between uses, and copies of host arrays."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def allocate(flat: Tensor) -> None:
    """Allocate memory for a flat tensor that was freed; its values are undefined. Its views use the new memory."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat: Tensor) -> None:
    """Free a flat tensor's memory. The tensor keeps its size, and so do its views and tensors that autograd saved of
    it."""
    flat.untyped_storage().resize_(0)


def is_allocated(flat: Tensor) -> bool:
    """Return whether a flat tensor has memory."""
    return flat.numel() == 0 or flat.untyped_storage().nbytes() > 0


def transient(size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a flat tensor that has no memory yet."""
    flat = torch.empty(size, dtype=dtype, device=device)
    free(flat)
    return flat


@contextmanager
def allocated(flat: Tensor) -> Iterator[None]:
    """Allocate a flat tensor for the duration of the block, if it has no memory: only then can views be taken of
    it."""
    had_memory = is_allocated(flat)
    if not had_memory:
        allocate(flat)
    try:
        yield
    finally:
        if not had_memory:
            free(flat)


def tensor_on(array: np.ndarray, device: torch.device, *, wide: bool = False) -> Tensor:
    """Return a contiguous tensor of the array's values and dtype on `device`.

    A GPU copies from pinned memory, in stream order, so that the host does not wait; the allocator keeps that memory
    until the copy is done. int64 is sent as int32 and widened on the device: token ids, positions and lengths all fit.

    wide: send integers unchanged, because int32 cannot hold all of them.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    narrowed = array.dtype == np.int64 and not wide
    sent = array.astype(np.int32) if narrowed else np.ascontiguousarray(array)
    moved = torch.from_numpy(sent).pin_memory().to(device, non_blocking=True)
    return moved.long() if narrowed else moved
