"""torch.save's archives: zip files of a pickle and of storages, read in place and written one tensor at a time."""

import io
import math
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import DISK, explained
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.conversion.foreign.sandbox import Sandbox, TensorPlace
from megapipe.conversion.tensor_stream import bytes_of

DTYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
"""torch's name of a type, without `torch.` -> that of safetensors, for the types that a checkpoint holds."""


class Archive:
    """An archive that torch.save wrote, at bytes `start` to `stop` of a file. value: what its pickle holds.

    Raises DamagedCheckpointError for an incomplete archive, CheckpointError for a pickle that is refused.
    """

    def __init__(self, path: Path, sandbox: Sandbox, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            size = os.fstat(self._descriptor).st_size
            self._start, stop = start, size if stop is None else stop
            if not 0 <= start <= stop <= size:
                raise self._damaged(f"it has {size} bytes, and bytes {start} to {stop} are requested")
            self.value = sandbox.load(self._descriptor, start, stop, str(path), archive=True)
        except BaseException:
            self.close()
            raise

    def _damaged(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path} is not a readable torch archive: {why}", "unreadable")

    def tensor(self, place: TensorPlace) -> Tensor:
        """A tensor's elements, contiguous and in memory of their own; the part of its storage that it spans is read.

        Raises DamagedCheckpointError if the file ends early, and if elements are repeated, since a small file could
        then become a tensor of any size.
        """
        if math.prod(place.shape) > place.span:
            raise self._damaged(f"a tensor of shape {place.shape} and stride {place.stride} repeats elements")
        dtype: torch.dtype = getattr(torch, place.dtype)
        flat = torch.empty(place.span, dtype=dtype)
        self._fill(flat, self._start + place.start + place.offset * dtype.itemsize)
        return flat.as_strided(place.shape, place.stride).contiguous() if place.span else flat.reshape(place.shape)

    def verify(self, place: TensorPlace) -> list[str]:
        """Read a tensor's whole storage: what is wrong with it, empty if nothing is."""
        try:
            self.tensor(place)
        except CheckpointError as error:
            return [str(error)]
        first = self._start + place.start
        checksum = 0
        for at in range(first, first + place.num_bytes, PIECE_BYTES):
            content = os.pread(self._descriptor, min(PIECE_BYTES, first + place.num_bytes - at), at)
            checksum = zlib.crc32(content, checksum)
        # torch can be configured to write no checksum, and then writes a zero.
        if place.crc32 in (0, checksum):
            return []
        return [f"{self.path}: the storage at byte {first:,} has changed since it was written: its CRC-32 differs"]

    def _fill(self, flat: Tensor, start: int) -> None:
        content = bytes_of(flat)
        while content:
            read = os.preadv(self._descriptor, [content[: 1 << 30]], start)
            if read == 0:
                raise self._damaged("it ends inside a storage")
            content, start = content[read:], start + read

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Slot:
    """A tensor that will be written: stands in a pickled value for it. key: of its storage, unique in the archive."""

    def __init__(self, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        storage = _StorageSlot(self.key, DTYPES[self.dtype], math.prod(self.shape))
        hooks: dict[str, Any] = {}
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, tuple(strides), False, hooks)


class _StorageSlot:
    def __init__(self, key: str, dtype: torch.dtype, num_elements: int) -> None:
        self.key, self.dtype, self.num_elements = key, dtype, num_elements


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, _StorageSlot):
            return None
        kind = torch.storage._dtype_to_storage_type_map()[value.dtype]
        return "storage", getattr(torch, kind), value.key, "cpu", value.num_elements


class _Output:
    """A new file that torch's writer of archives writes to: every change of the disk is a StorageWriter's.

    failure: what the disk refused. It is told and not raised, since torch's writer aborts the process where its
    destructor, which completes the file, meets an exception.
    """

    def __init__(self, path: Path) -> None:
        self._folder, self.failure, self._descriptor = path.parent, "", DISK.create(path)

    def write(self, content: Any) -> int:
        """Write all of it, or nothing once a write has failed or the file is closed."""
        left = memoryview(content)
        size = left.nbytes
        try:
            while left and self._descriptor >= 0 and not self.failure:
                left = left[DISK.write(self._descriptor, left) :]
        except OSError as error:
            self.failure = explained(error, self._folder)
        return size

    def close(self, *, durable: bool) -> None:
        """Close the file; a second time does nothing. durable: flush it before."""
        if self._descriptor < 0:
            return
        try:
            if durable and not self.failure:
                DISK.flush(self._descriptor)
        except OSError as error:
            self.failure = explained(error, self._folder)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            DISK.close(descriptor)


class ArchiveWriter:
    """An archive that torch.load reads, written one tensor at a time. value: what it holds, a Slot for each tensor.

    Every method raises CheckpointError where the disk does not take what is written.
    """

    def __init__(self, path: Path, value: Any) -> None:
        content = io.BytesIO()
        _Pickler(content, protocol=2).dump(value)
        self.path = path
        try:
            self._output = _Output(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explained(error, path.parent)}") from error
        self._writer = torch._C.PyTorchFileWriter(self._output)  # type: ignore[call-overload]  # write is all it needs
        self._record("data.pkl", content.getvalue(), len(content.getvalue()))
        self._record("byteorder", b"little", len(b"little"))

    def add(self, key: str, values: Tensor) -> None:
        """Write the elements of the Slot of this key."""
        whole = values.contiguous()
        if whole.storage_offset():  # what is written is the beginning of the storage
            whole = whole.clone()
        self._record(f"data/{key}", whole.untyped_storage(), whole.nbytes)

    def close(self) -> None:
        """Complete the file and make it durable."""
        self._writer.write_end_of_file()
        self._output.close(durable=True)
        self._check()

    def abandon(self) -> None:
        """Close the file as it is: it is about to be removed."""
        self._output.close(durable=False)

    def _record(self, name: str, content: Any, size: int) -> None:
        self._writer.write_record(name, content, size)
        self._check()

    def _check(self) -> None:
        if self._output.failure:
            self._output.close(durable=False)
            raise CheckpointError(f"cannot write {self.path}: {self._output.failure}")
