"""safetensors files, written so that the bytes that are hashed are the bytes in memory, and read in checked pieces.

Format: github.com/huggingface/safetensors. The library that defines it reads; it writes beyond the reach of
`StorageWriter`, so the writing is done here.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import StorageWriter, write_file

PIECE_BYTES = 1 << 24
"""A checksum covers this many bytes of a tensor, so that reading a slice need not read and check the whole."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The format's names of the types that a checkpoint holds."""

_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class FileTensor:
    """A tensor for a file. values: its elements as one contiguous dimension; shape: how readers see it."""

    key: str
    shape: tuple[int, ...]
    values: Tensor

    @property
    def dtype(self) -> str:
        """The format's name of the type."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.values.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.values.numel() * self.values.element_size()


def write_tensors(
    storage: StorageWriter, path: Path, tensors: Iterable[FileTensor]
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Write a new file, durably. Returns its bytes and each key's checksums, one a piece, of the bytes in memory."""
    # Wide types first, as the format's own writer has it: every tensor then starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.values.element_size())
    checksums: dict[str, tuple[str, ...]] = {}

    def parts() -> Iterator[memoryview]:
        yield memoryview(_header(ordered))
        for tensor in ordered:
            found = []
            for piece in _pieces(tensor.values):
                found.append(xxhash.xxh3_64_hexdigest(piece))
                yield piece
            checksums[tensor.key] = tuple(found)

    size = write_file(storage, path, parts())
    return size, checksums


def _header(tensors: Sequence[FileTensor]) -> bytes:
    entries, position = {}, 0
    for tensor in tensors:
        stop = position + tensor.num_bytes
        entries[tensor.key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (position, stop)}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _pieces(values: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes, piece by piece, so that one on a GPU needs little host memory."""
    for part in values.split(PIECE_BYTES // values.element_size()):
        yield _bytes(part.cpu())


def _bytes(values: Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)


class TensorFile:
    """A safetensors file, mapped into memory: only what is touched is read. keys: of its tensors.

    Raises DamagedCheckpointError when it is not one, CheckpointError when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; every rank must see all files of a checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise DamagedCheckpointError(
                f"{path} is not a readable safetensors file: {error}", "unreadable"
            ) from error
        self.keys = frozenset(self._file.keys())

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, not yet read. Raises DamagedCheckpointError when the file holds no such tensor."""
        if key not in self.keys:
            raise DamagedCheckpointError(f"{self._path} has no tensor {key!r}", "unreadable")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def flat(self, key: str, dtype: str, num_elements: int) -> Tensor:
        """The elements of a tensor, in one dimension and not yet read.

        Raises DamagedCheckpointError when the file holds no such tensor, or not one of this type and size.
        """
        tensor = self.tensor(key)
        if tensor.dtype != DTYPES[dtype] or tensor.numel() != num_elements:
            raise DamagedCheckpointError(
                f"{self._path}: tensor {key!r} has {tensor.numel()} elements of {tensor.dtype}; the manifest has "
                f"{num_elements} of {DTYPES[dtype]}",
                "unreadable",
            )
        return tensor.reshape(-1)

    def check(self, key: str, flat: Tensor, checksums: Sequence[str], spans: Iterable[range]) -> None:
        """Read the pieces in which `spans` of elements lie.

        Raises DamagedCheckpointError when their bytes are not those that were saved.
        """
        content = _bytes(flat)
        width = flat.element_size()
        touched = {
            piece
            for span in spans
            for piece in range(span.start * width // PIECE_BYTES, -(-span.stop * width // PIECE_BYTES))
        }
        for piece in sorted(touched):
            start = piece * PIECE_BYTES
            found = xxhash.xxh3_64_hexdigest(content[start : start + PIECE_BYTES])
            if found != checksums[piece]:
                raise DamagedCheckpointError(
                    f"{self._path}: tensor {key!r}, bytes {start} to {min(start + PIECE_BYTES, len(content))}, have "
                    f"checksum {found} instead of {checksums[piece]}: the file has changed since it was saved",
                    "checksum",
                )
