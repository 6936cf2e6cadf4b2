"""From numpy arrays to tensors on a rank's device, without waiting for it."""

import numpy as np
import torch
from torch import Tensor


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
