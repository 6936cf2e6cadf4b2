"""Keeps freed tensors from staying in the process's memory."""

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have the C library give blocks above a megabyte back to the system when they are freed.

    By itself glibc raises that bound to the largest block freed so far; tensors then come from a heap in which small
    blocks between them leave holes, and a conversion to several files grew by half of the model (measured). Other C
    libraries have no such call and no such rule.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _BYTES)
