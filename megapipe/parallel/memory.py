"""Memory of a rank's device: tensors whose memory is freed between uses, and copies of host arrays."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def allocate(flat: Tensor) -> None:
    """Give a flat tensor that was freed its memory back, its values unknown; views of it see the new memory."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat: Tensor) -> None:
    """Give a flat tensor's memory back. It keeps its size, and so do its views and what autograd saved of it."""
    flat.untyped_storage().resize_(0)


def is_allocated(flat: Tensor) -> bool:
    """Whether a flat tensor has its memory."""
    return flat.numel() == 0 or flat.untyped_storage().nbytes() > 0


def transient(size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A flat tensor without memory yet."""
    flat = torch.empty(size, dtype=dtype, device=device)
    free(flat)
    return flat


@contextmanager
def allocated(flat: Tensor) -> Iterator[None]:
    """Memory for the time of the block where there is none: views can be taken of that alone."""
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

    A GPU copies from pinned memory, in the order of its queue, so that the host waits for nothing; the allocator keeps
    that memory until the copy is done. int64 crosses the bus as int32 and is widened there: token ids, places and
    lengths all fit.

    wide: integers cross the bus as they are, because int32 cannot hold all of them.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    narrowed = array.dtype == np.int64 and not wide
    sent = array.astype(np.int32) if narrowed else np.ascontiguousarray(array)
    moved = torch.from_numpy(sent).pin_memory().to(device, non_blocking=True)
    return moved.long() if narrowed else moved
