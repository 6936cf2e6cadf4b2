"""A file that is written in order and knows the checksum of what it holds, also when its writing is taken up again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

from megapipe.data.durable import flush_to_disk
from megapipe.data.errors import DataError

_BUFFER = 1 << 20


class HashedFile:
    """`xxh128:<hex>` is the XXH3 hash of 128 bits, as `xxh128sum` prints it: for damage, not against forgery."""

    def __init__(self, file: BinaryIO, digest: "xxhash.xxh3_128") -> None:
        self._file = file
        self._digest = digest

    @classmethod
    def create(cls, path: Path) -> "HashedFile":
        return cls(path.open("wb", buffering=_BUFFER), xxhash.xxh3_128())

    @classmethod
    def resume(cls, path: Path, size: int, checksum: str) -> "HashedFile":
        """Opens a file to write on after its first `size` bytes; what stands behind them is cut off.

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
                raise DataError(f"{path} is not what was written: {size} bytes of checksum {checksum} are expected")
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
    """Of the whole file, unless `stopped` becomes true on the way."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while not stopped() and (block := file.read(_BUFFER)):
            digest.update(block)
    return _named(digest)


def _named(digest: "xxhash.xxh3_128") -> str:
    return f"xxh128:{digest.hexdigest()}"
