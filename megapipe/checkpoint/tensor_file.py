"""safetensors files: checksums are computed from the bytes in memory, and reads check tensors piece by piece.

Format: github.com/huggingface/safetensors. Its library checks every file before it is read. The library does not write
through `StorageWriter`, so files are written here.

A rank writes its file at once (`write_tensors`) and maps it into memory to read (`TensorFile`). Conversion writes and
reads one tensor at a time (`TensorStream`, `TensorReader`): pages of a mapped file count as resident memory after they
are touched, so that reading a checkpoint through `safe_open` would keep all of it in memory.
"""

import io
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapipe.checkpoint.storage import (
    DISK,
    CheckpointError,
    DamagedCheckpointError,
    NewFile,
    StorageWriter,
    on_failure,
    writing,
)

PIECE_BYTES = 1 << 24
"""A checksum covers this number of bytes of a tensor, so that a slice can be read and checked without the rest."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The element types that a checkpoint may contain, by their names in safetensors."""

_HEADER_ALIGNMENT = 8
_OF_TORCH = {"format": "pt"}
"""Metadata that transformers expects in a file of torch's tensors."""
_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file: the limit of the format."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write to a file. values: its elements, contiguous and flattened. shape: its shape in the file."""

    key: str
    shape: tuple[int, ...]
    values: Tensor

    @property
    def dtype(self) -> str:
        """Name of the element type in safetensors."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.values.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return self.values.numel() * self.values.element_size()


def write_tensors(
    storage: StorageWriter, path: Path, tensors: Iterable[FileTensor]
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Write a new file durably. Return its size in bytes and, by key, the checksums of all pieces in memory."""
    # Wide types come first, as in the library's files: every tensor then starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.values.element_size())
    described = ((each.key, each.dtype, each.shape) for each in ordered)
    file = TensorStream(path, described, storage, metadata={})
    with on_failure(file.abandon):
        checksums = {each.key: file.add(each.key, each.values.view(each.shape)) for each in ordered}
        file.close()
    with writing(path):
        storage.flush_folder(path.parent)
    return file.size, checksums


class Entry:
    """One tensor of a file. start: offset of its first element, from the end of the header or from the start of the
    file."""

    def __init__(self, key: str, dtype: str, shape: Sequence[int], start: int) -> None:
        self.key, self.dtype, self.shape, self.start = key, dtype, tuple(shape), start
        self.num_elements = math.prod(self.shape)
        self.num_bytes = self.num_elements * DTYPES[dtype].itemsize


def _layout(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Entry]]:
    """Return the header and the entries of a file that contains `tensors`, (key, dtype, shape), in this order."""
    entries: list[Entry] = []
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for key, dtype, shape in tensors:
        entries.append(Entry(key, dtype, shape, position))
        stop = position + entries[-1].num_bytes
        header[key] = {"dtype": dtype, "shape": tuple(shape), "data_offsets": (position, stop)}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return _LENGTH.pack(len(text)) + text, entries


def _pieces(values: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes in pieces, so that a tensor on a GPU needs little host memory."""
    for part in values.split(PIECE_BYTES // values.element_size()):
        yield bytes_of(part.cpu())


def bytes_of(flat: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of one dimension, sharing its memory."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def touched_pieces(spans: Iterable[range], width: int) -> list[int]:
    """Return the indices, ascending, of the pieces that contain `spans`: ranges of elements of `width` bytes."""
    touched = (range(span.start * width // PIECE_BYTES, -(-span.stop * width // PIECE_BYTES)) for span in spans)
    return sorted(set(itertools.chain.from_iterable(touched)))


def check_piece(path: Path, key: str, start: int, piece: memoryview, checksum: str) -> None:
    """Raise DamagedCheckpointError unless a piece of a tensor, which starts at byte `start`, has this checksum."""
    actual = xxhash.xxh3_64_hexdigest(piece)
    if actual != checksum:
        raise DamagedCheckpointError(
            f"{path}: tensor {key!r}, bytes {start} to {start + len(piece)}, have checksum "
            f"{actual} instead of {checksum}: the file has changed since it was saved",
            "checksum",
        )


def check_safetensors(path: Path) -> int:
    """Return the size of a safetensors file's header in bytes. Raises DamagedCheckpointError if it is impossible."""
    try:
        with path.open("rb") as file:
            prefix, size = file.read(_LENGTH.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; every rank must see all files of a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    length: int = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > MAX_HEADER_BYTES or length + _LENGTH.size > size:
        raise DamagedCheckpointError(
            f"{path} is not a readable safetensors file: it claims a header of {length:,} "
            f"bytes in a file of {size:,}; at most {MAX_HEADER_BYTES:,} are read",
            "unreadable",
        )
    return length


def open_to_read(path: Path) -> io.FileIO:
    """Open a file for reading without a buffer. Raises CheckpointError if this fails."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def read_into(file: io.FileIO, content: memoryview, position: int) -> bool:
    """Fill `content` with the bytes of a file, starting at `position`; return False if the file ends first. Raises
    OSError."""
    while content:
        # The system reads no more than 2 GiB at once.
        count = os.preadv(file.fileno(), [content[: 1 << 30]], position)
        if count == 0:
            return False
        content, position = content[count:], position + count
    return True


class TensorFile:
    """A safetensors file that is mapped into memory: only touched pages are read. entries: names of its tensors.

    Raises DamagedCheckpointError if it is not a valid safetensors file, CheckpointError if the file is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        check_safetensors(path)
        try:
            self._file = safe_open(str(path), framework="pt")
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise DamagedCheckpointError(
                f"{path} is not a readable safetensors file: {error}", "unreadable"
            ) from error
        self.entries = frozenset(self._file.keys())

    def whole(self, key: str) -> Tensor:
        """Return a whole tensor, which is read when it is used. Raises DamagedCheckpointError if the file lacks it."""
        if key not in self.entries:
            raise DamagedCheckpointError(f"{self._path} has no tensor {key!r}", "unreadable")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def flat(self, key: str, dtype: str, num_elements: int) -> Tensor:
        """Return the elements of a tensor in one dimension. They are read when they are used.

        Raises DamagedCheckpointError if the file has no such tensor, or if its type or size differs.
        """
        tensor = self.whole(key)
        if tensor.dtype != DTYPES[dtype] or tensor.numel() != num_elements:
            raise DamagedCheckpointError(
                f"{self._path}: tensor {key!r} has {tensor.numel()} elements of "
                f"{tensor.dtype}; the manifest has {num_elements} of {DTYPES[dtype]}",
                "unreadable",
            )
        return tensor.reshape(-1)

    def check(self, key: str, flat: Tensor, checksums: Sequence[str], spans: Iterable[range]) -> None:
        """Read and check the pieces that contain `spans` of elements.

        Raises DamagedCheckpointError if their bytes differ from those that were saved.
        """
        content = bytes_of(flat)
        for piece in touched_pieces(spans, flat.element_size()):
            start = piece * PIECE_BYTES
            check_piece(self._path, key, start, content[start : start + PIECE_BYTES], checksums[piece])


class TensorStream:
    """Writes a safetensors file tensor by tensor, in the order of `tensors`: (key, dtype, shape).

    size: bytes of the whole file.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, str, Sequence[int]]],
        storage: StorageWriter = DISK,
        metadata: Mapping[str, str] = _OF_TORCH,
    ) -> None:
        header, self._remaining = _layout(tensors, metadata)
        self.size = len(header) + sum(entry.num_bytes for entry in self._remaining)
        self._file = NewFile(path, storage)
        with on_failure(self._file.abandon):
            self._file.write(memoryview(header))

    def add(self, key: str, values: Tensor) -> tuple[str, ...]:
        """Write the next tensor; return the checksum of each PIECE_BYTES of its bytes."""
        entry = self._remaining.pop(0)
        if (entry.key, entry.shape, DTYPES[entry.dtype]) != (key, tuple(values.shape), values.dtype):
            raise ValueError(
                f"{self._file.path.name} expects {entry.key} {entry.dtype} {entry.shape} next, not "
                f"{key} {values.dtype} {tuple(values.shape)}"
            )
        checksums = []
        for piece in _pieces(values.contiguous().reshape(-1)):
            checksums.append(xxhash.xxh3_64_hexdigest(piece))
            self._file.write(piece)
        return tuple(checksums)

    @property
    def full(self) -> bool:
        """Whether every tensor has been written."""
        return not self._remaining

    def close(self) -> None:
        """Make the file durable. Every tensor must have been added."""
        if self._remaining:
            raise ValueError(f"{self._file.path.name} still lacks {self._remaining[0].key}")
        self._file.close()

    def abandon(self) -> None:
        """Close the file without completing it."""
        self._file.abandon()


class TensorReader:
    """A safetensors file that can be read in parts, without a memory mapping.

    Raises DamagedCheckpointError if it is not a valid safetensors file, CheckpointError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        length = check_safetensors(path)
        self._file = open_to_read(path)
        with on_failure(self.close):
            self.entries = self._checked_entries(length)

    def _checked_entries(self, length: int) -> dict[str, Entry]:
        try:
            # The library detects holes, overlaps, sizes that overflow, and repeated keys.
            with safe_open(str(self.path), framework="pt"):
                pass
            header = json.loads(os.pread(self._file.fileno(), length, _LENGTH.size))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{self.path} is not a readable safetensors file: {error}", "unreadable"
            ) from error
        base = _LENGTH.size + length
        return {
            key: Entry(key, fields["dtype"], fields["shape"], base + fields["data_offsets"][0])
            for key, fields in header.items()
            # Integer buffers are ignored: no model here has any.
            if key != "__metadata__" and fields["dtype"] in DTYPES
        }

    def entry(self, key: str) -> Entry:
        """Return the entry of a tensor. Raises DamagedCheckpointError if the file has no such tensor of a known
        type."""
        if key not in self.entries:
            raise DamagedCheckpointError(
                f"{self.path} has no tensor {key!r} of type {', '.join(DTYPES)}; other types are not weights",
                "unreadable",
            )
        return self.entries[key]

    def whole(self, key: str) -> Tensor:
        """Return a tensor in newly allocated memory."""
        entry = self.entry(key)
        flat = torch.empty(entry.num_elements, dtype=DTYPES[entry.dtype])
        self.read(key, bytes_of(flat), 0)
        return flat.reshape(entry.shape)

    def read(self, key: str, content: memoryview, start: int) -> None:
        """Fill `content` with the bytes of a tensor, starting at its byte `start`."""
        try:
            complete = read_into(self._file, content, self.entry(key).start + start)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        if not complete:
            raise DamagedCheckpointError(f"{self.path} ends inside tensor {key!r}", "files")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
