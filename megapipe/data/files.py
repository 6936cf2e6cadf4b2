"""Checksums of files, and the page cache."""

import contextlib
import ctypes
import io
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapipe.data import DataError

_BUFFER = 1 << 20

SAMPLED_PIECES = 64
PIECE_BYTES = 1 << 16


class HashedFile(io.BufferedWriter):
    """A file that is written from beginning to end, with a checksum of its content.

    Writing can be resumed. `xxh128:<hex>` is the 128-bit XXH3 hash, as `xxh128sum` prints it. It detects damage, not
    forgery.
    """

    def __init__(self, path: Path, mode: str = "wb") -> None:
        super().__init__(io.FileIO(path, mode), _BUFFER)
        self._digest = xxhash.xxh3_128()

    @classmethod
    def resume(cls, path: Path, size: int, checksum: str) -> "HashedFile":
        """Open a file to continue writing after its first `size` bytes, and truncate it there.

        Raises DataError if these bytes are missing or their checksum differs.
        """
        file = cls(path, "r+b")
        try:
            remaining = size
            while remaining and (block := os.read(file.fileno(), min(remaining, _BUFFER))):
                file._digest.update(block)
                remaining -= len(block)
            if remaining or file.checksum() != checksum:
                raise DataError(f"{path} changed since it was written: expected {size} bytes with checksum {checksum}")
            file.truncate(size)
            file.seek(size)
        except BaseException:
            file.close()
            raise
        return file

    def write(self, data: Any) -> int:
        """Write bytes, and add them to the checksum."""
        self._digest.update(data)
        return super().write(data)

    def checksum(self) -> str:
        return _named(self._digest)


def checksum_of_file(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the checksum of the whole file, or of the part that was read when `stopped` became true."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while not stopped() and (block := file.read(_BUFFER)):
            digest.update(block)
    return _named(digest)


def sampled_checksum(path: Path) -> str:
    """Return `xxh128-sampled:<hex>`, a checksum of a file's size and of SAMPLED_PIECES evenly spaced pieces of it.

    A file of at most SAMPLED_PIECES x PIECE_BYTES bytes (4 MiB) is read completely. The first and the last byte of any
    file are in a piece. The cost does not grow with the file, but a change between two pieces is not detected.

    Raises OSError if the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        last = max((SAMPLED_PIECES - 1) * PIECE_BYTES, size - PIECE_BYTES)
        for piece in range(SAMPLED_PIECES):
            start = piece * last // (SAMPLED_PIECES - 1)
            digest.update(os.pread(file.fileno(), PIECE_BYTES, start))
    return f"xxh128-sampled:{digest.hexdigest()}"


def _named(digest: "xxhash.xxh3_128") -> str:
    return f"xxh128:{digest.hexdigest()}"


SAMPLED_RUNS = 1024
PAGES_IN_A_RUN = 64


def drop_from_page_cache(paths: Iterable[str | Path]) -> None:
    """Ask the kernel to remove files from the page cache, by posix_fadvise(2) with DONTNEED. Unwritten data is written
    first.

    The kernel keeps pages that a process has mapped, including this process, and files in memory (tmpfs).
    `resident_share` shows the result. Caches below the kernel, of a network file system or a disk, are not emptied.

    Raises OSError if a file cannot be opened, or if the system has no posix_fadvise.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise")
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            with contextlib.suppress(OSError):  # a read-only file system has no unwritten data
                os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(paths: Iterable[str | Path]) -> float:
    """Return the fraction of the files' pages that are in memory, by mincore(2), without reading a page.

    In a file with more than SAMPLED_RUNS x PAGES_IN_A_RUN pages, only this number of pages is checked, in evenly
    spaced ranges. Linux reports all pages as resident if the caller neither owns the file nor may write it.

    Raises OSError if the system has no mincore.
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


def _resident_share(mapped: np.ndarray, pages: int) -> float:
    """Return the fraction of the pages of one mapped file that are in memory."""
    length = min(pages, PAGES_IN_A_RUN)
    runs = min(SAMPLED_RUNS, -(-pages // length))
    flags = np.zeros(length, dtype=np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mincore"):
        raise OSError("this system has no mincore")
    num_resident = 0
    for first in np.linspace(0, pages - length, runs).astype(np.int64).tolist():
        address = mapped.ctypes.data + first * mmap.PAGESIZE
        if library.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(length * mmap.PAGESIZE), ctypes.c_void_p(flags.ctypes.data)
        ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        num_resident += int((flags & 1).sum())
    return num_resident / (runs * length)
