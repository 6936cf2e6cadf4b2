"""From numpy arrays to tensors on a rank's device."""

import numpy as np
import torch
from torch import Tensor


def tensor_on(array: np.ndarray, device: torch.device) -> Tensor:
    """A contiguous tensor of the array's values and dtype on `device`.

    To a GPU integers cross the bus as int32 (token ids, places and lengths all fit) and are widened there, from pinned
    memory, so that nobody waits for the copy: it takes its place in the GPU's queue. The allocator keeps that memory
    until the copy is done.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    narrow = array.astype(np.int32) if array.dtype == np.int64 else np.ascontiguousarray(array)
    moved = torch.from_numpy(narrow).pin_memory().to(device, non_blocking=True)
    return moved.long() if array.dtype == np.int64 else moved
