"""Host memory that a training step gives back is kept for the next one.

glibc hands large blocks that are freed back to the operating system, which clears their pages when they are wanted
again. Every step wants the same ones: buffers of sharded weights and gradients come and go with every layer,
activations with every micro-batch. Kept, they cost nothing the second time, as a GPU's caching allocator does it.
"""

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Numbers of options of mallopt(3): free memory at the heap's end from which it is given back, and the size from which
a block is a mapping of its own."""
NEVER = 2**31 - 1
LARGEST = (2**30, 2**25)
"""Thresholds for mappings, the first that the C library takes: some know none above 32 MiB."""
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables by which a user has said how memory is to be allocated, or by what."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the host memory that it frees; whether it will.

    Nothing is changed where the C library has no such options, or the environment has chosen otherwise.
    """
    if any(environment.get(name) for name in CHOSEN_BY_USER):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = any(set_option(M_MMAP_THRESHOLD, size) for size in LARGEST)
    return bool(set_option(M_TRIM_THRESHOLD, NEVER)) and kept
