"""What the page cache holds of files, and how to empty it of them without being root."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SAMPLED_RUNS = 1024
PAGES_IN_A_RUN = 64


def drop_from_page_cache(paths: Iterable[str | Path]) -> None:
    """Asks the kernel to forget files: posix_fadvise(2) with DONTNEED, after what is unwritten was written.

    It keeps pages that some process has mapped, this one included, and files that live in memory (tmpfs).
    `resident_share` tells what came of it. Caches behind the kernel, of a network file system or a disk, stay.

    Raises OSError for a file that cannot be opened, or where the system has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise")
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a read-only file system has nothing unwritten
                os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident_share(paths: Iterable[str | Path]) -> float:
    """Share of the files' pages that memory holds, by mincore(2), without touching a page.

    Of a file of more than SAMPLED_RUNS x PAGES_IN_A_RUN pages that many are looked at, in evenly spaced runs. Linux
    calls everything resident in files that the caller may not write and does not own.

    Raises OSError where the system cannot tell.
    """
    pages = resident = 0.0
    for path in paths:
        size = os.path.getsize(path)
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        pages += count
        resident += count * _resident_share(np.memmap(path, dtype=np.uint8, mode="r"), count)
    return resident / pages if pages else 0.0


def memory_for_files() -> int | None:
    """Bytes of memory that could cache files now, Linux's MemAvailable; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _resident_share(mapped: np.ndarray, pages: int) -> float:
    """Share of the resident pages of one mapped file."""
    length = min(pages, PAGES_IN_A_RUN)
    runs = min(SAMPLED_RUNS, -(-pages // length))
    found = np.zeros(length, dtype=np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mincore"):
        raise OSError("this system has no mincore")
    seen = 0
    for first in np.linspace(0, pages - length, runs).astype(np.int64).tolist():
        address = mapped.ctypes.data + first * mmap.PAGESIZE
        if library.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(length * mmap.PAGESIZE), ctypes.c_void_p(found.ctypes.data)
        ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        seen += int((found & 1).sum())
    return seen / (runs * length)
