"""Checksums of files: of one that is written in order, of a whole file, and of pieces of a large one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

from megapipe.data.durable import flush_to_disk
from megapipe.data.errors import DataError

_BUFFER = 1 << 20

SAMPLED_PIECES = 64
PIECE_BYTES = 1 << 16


class HashedFile:
    """A file that is written in order, with the checksum of its content, also when writing is resumed.

    `xxh128:<hex>` is the XXH3 hash of 128 bits, as `xxh128sum` prints it: against damage, not against forgery.
    """

    def __init__(self, file: BinaryIO, digest: "xxhash.xxh3_128") -> None:
        self._file = file
        self._digest = digest

    @classmethod
    def create(cls, path: Path) -> "HashedFile":
        return cls(path.open("wb", buffering=_BUFFER), xxhash.xxh3_128())

    @classmethod
    def resume(cls, path: Path, size: int, checksum: str) -> "HashedFile":
        """Open a file to continue writing after its first `size` bytes; what follows them is cut off.

        Raises DataError when those bytes are missing or do not have the checksum.
        """
        digest = xxhash.xxh3_128()
        file = path.open("r+b", buffering=_BUFFER)
        try:
            left = size
            while left and (block := file.read(min(left, _BUFFER))):
                digest.update(block)
                left -= len(block)
            if left or _named(digest) != checksum:
                raise DataError(
                    f"{path} has changed since it was written: expected {size} bytes with checksum {checksum}"
                )
            os.ftruncate(file.fileno(), size)
            file.seek(size)
        except BaseException:
            file.close()
            raise
        return cls(file, digest)

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def checksum(self) -> str:
        return _named(self._digest)

    def flush(self) -> None:
        self._file.flush()

    def flush_to_disk(self) -> None:
        flush_to_disk(self._file)

    def close(self) -> None:
        self._file.close()


def checksum_of_file(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the checksum of the whole file, or of its beginning once `stopped` becomes true."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while not stopped() and (block := file.read(_BUFFER)):
            digest.update(block)
    return _named(digest)


def sampled_checksum(path: Path) -> str:
    """Return `xxh128-sampled:<hex>` of a file's size and of SAMPLED_PIECES pieces of it, evenly spaced.

    A file of at most SAMPLED_PIECES x PIECE_BYTES bytes (4 MiB) is read whole. The first and the last byte of any file
    are in a piece, so that the cost does not grow with the file: a change between two pieces goes unnoticed.

    Raises OSError for a file that cannot be read.
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
