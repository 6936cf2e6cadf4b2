"""safetensors files written tensor by tensor and read without a mapping.

A mapped file counts as resident memory once it is touched, so that reading a checkpoint through `safe_open` would hold
all of it; here a tensor is read into memory of its own. The library still judges every file before it is read.
"""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import DISK, StorageWriter, explained
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.checkpoint.untrusted import check_safetensors

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


class Entry:
    """One tensor of a file. start: byte of the file where its elements begin."""

    def __init__(self, key: str, dtype: str, shape: Sequence[int], start: int) -> None:
        self.key, self.dtype, self.shape, self.start = key, dtype, tuple(shape), start
        self.num_elements = int(np.prod(self.shape, dtype=object)) if self.shape else 1
        self.num_bytes = self.num_elements * DTYPES[dtype].itemsize


def layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[Entry]]:
    """Header and entries of a file that holds (key, dtype, shape) in this order."""
    entries, described, position = [], {}, 0
    for key, dtype, shape in tensors:
        entry = Entry(key, dtype, shape, position)
        described[key] = {
            "dtype": dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.num_bytes],
        }
        position += entry.num_bytes
        entries.append(entry)
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    for entry in entries:
        entry.start += len(header)
    return header, entries


class TensorStream:
    """Writes a safetensors file, one tensor after the other, in the order of `tensors`: (key, dtype, shape).

    size: bytes of the whole file.
    """

    def __init__(
        self, path: Path, tensors: Iterable[tuple[str, str, Sequence[int]]], storage: StorageWriter = DISK
    ) -> None:
        self._path, self._storage = path, storage
        header, self._left = layout(tensors)
        self.size = len(header) + sum(entry.num_bytes for entry in self._left)
        try:
            self._descriptor = storage.create(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explained(error, path.parent)}") from error
        self._write(memoryview(header))

    def add(self, key: str, values: Tensor) -> tuple[str, ...]:
        """Write the next tensor; returns the checksum of each PIECE_BYTES of its bytes."""
        entry = self._left.pop(0)
        if (entry.key, entry.shape, DTYPES[entry.dtype]) != (key, tuple(values.shape), values.dtype):
            raise ValueError(
                f"{self._path.name} expects {entry.key} {entry.dtype} {entry.shape} next, not {key} {values.dtype} "
                f"{tuple(values.shape)}"
            )
        checksums = []
        content = bytes_of(values.contiguous().reshape(-1))
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            checksums.append(xxhash.xxh3_64_hexdigest(piece))
            self._write(piece)
        return tuple(checksums)

    @property
    def full(self) -> bool:
        """Whether every tensor has been written."""
        return not self._left

    def close(self) -> None:
        """Make the file durable; every tensor has been added."""
        if self._left:
            raise ValueError(f"{self._path.name} still lacks {self._left[0].key}")
        try:
            self._storage.flush(self._descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {explained(error, self._path.parent)}") from error
        finally:
            self._release()

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._descriptor >= 0:
            self._release()

    def _release(self) -> None:
        self._storage.close(self._descriptor)
        self._descriptor = -1

    def _write(self, part: memoryview) -> None:
        try:
            while part:
                part = part[self._storage.write(self._descriptor, part) :]
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {explained(error, self._path.parent)}") from error


class TensorReader:
    """A safetensors file: entries by key, and reads of some bytes of one.

    Raises DamagedCheckpointError when it is not one, CheckpointError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header_bytes = check_safetensors(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.entries = self._judged()
        except BaseException:
            self.close()
            raise

    def _judged(self) -> dict[str, Entry]:
        length = self._header_bytes
        try:
            # Holes, overlaps, sizes that overflow, and keys that stand twice are for the library to find.
            with safe_open(str(self.path), framework="pt"):
                pass
            header: dict[str, Any] = json.loads(os.pread(self._descriptor, length, _LENGTH.size))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{self.path} is not a readable safetensors file: {error}", "unreadable"
            ) from error
        base = _LENGTH.size + length
        found = {}
        for key, described in header.items():
            if key == "__metadata__":
                continue
            if described["dtype"] not in DTYPES:
                continue  # an integer buffer, which no model here has
            found[key] = Entry(key, described["dtype"], described["shape"], base + described["data_offsets"][0])
        return found

    def entry(self, key: str) -> Entry:
        """Where a tensor lies. Raises DamagedCheckpointError when the file holds no such tensor of a known type."""
        if key not in self.entries:
            raise DamagedCheckpointError(
                f"{self.path} has no tensor {key!r} of type {', '.join(DTYPES)}; other types are not weights",
                "unreadable",
            )
        return self.entries[key]

    def whole(self, key: str) -> Tensor:
        """A tensor, in memory of its own."""
        entry = self.entry(key)
        flat = torch.empty(entry.num_elements, dtype=DTYPES[entry.dtype])
        self.read(key, bytes_of(flat), 0)
        return flat.reshape(entry.shape)

    def read(self, key: str, content: memoryview, start: int) -> None:
        """Fill `content` with the bytes of a tensor from its byte `start` on."""
        position = self.entry(key).start + start
        while content:
            try:
                # The system reads no more than 2 GiB at once.
                count = os.preadv(self._descriptor, [content[: 1 << 30]], position)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
            if count == 0:
                raise DamagedCheckpointError(f"{self.path} ends inside tensor {key!r}", "files")
            content, position = content[count:], position + count

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of one dimension, shared with it."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
