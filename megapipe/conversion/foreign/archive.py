"""torch.save's archives: zip files of a pickle and of storages, read in place and written tensor by tensor."""

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import DISK, explained
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.conversion.foreign.sandbox import Sandbox, TensorPlace
from megapipe.conversion.tensor_stream import bytes_of

MAX_MEMBERS = 1_000_000
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"


class Window(io.RawIOBase):
    """Bytes `start` to `stop` of a file, as a file of their own: DCP's files are archives one behind the other."""

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        self._descriptor, self._start, self._size, self._position = descriptor, start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        content = os.pread(self._descriptor, count, self._start + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class Archive:
    """An archive that torch.save wrote, at bytes `start` to `stop` of a file. value: what its pickle holds.

    Raises DamagedCheckpointError for what is no whole archive, CheckpointError for a pickle that is refused.
    """

    def __init__(self, path: Path, sandbox: Sandbox, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            size = os.fstat(self._descriptor).st_size
            self._start, self._stop = start, size if stop is None else stop
            if not 0 <= self._start <= self._stop <= size:
                raise self._damaged(f"it has {size} bytes, and bytes {start} to {stop} are asked for")
            self._members = self._found()
            self.value = sandbox.load(self._pickle(), str(path))
        except BaseException:
            self.close()
            raise

    def _damaged(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path} is not a readable torch archive: {why}", "unreadable")

    def _found(self) -> dict[str, zipfile.ZipInfo]:
        """Member -> entry, without the folder that every name begins with."""
        try:
            with zipfile.ZipFile(Window(self._descriptor, self._start, self._stop)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, OSError, struct.error) as error:
            told = f"{error}; if it is from before torch 1.6, load and save it once with a newer torch"
            raise self._damaged(told) from error
        if len(entries) > MAX_MEMBERS:
            raise self._damaged(f"it has {len(entries):,} members; at most {MAX_MEMBERS:,} are read")
        found: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            name = entry.filename.partition("/")[2]
            if name in found or entry.compress_type != zipfile.ZIP_STORED:
                raise self._damaged(f"member {entry.filename!r} stands twice or is compressed")
            found[name] = entry
        if "byteorder" in found and self._content("byteorder", found) != b"little":
            raise self._damaged("its numbers are big-endian")
        return found

    def _pickle(self) -> bytes:
        if "data.pkl" not in self._members:
            raise self._damaged("it has no data.pkl")
        return self._content("data.pkl", self._members)

    def _content(self, name: str, members: Mapping[str, zipfile.ZipInfo]) -> bytes:
        start, size = self._span(members[name])
        return os.pread(self._descriptor, size, start)

    def _span(self, entry: zipfile.ZipInfo) -> tuple[int, int]:
        """First byte in the file, and size, of a member."""
        at = self._start + entry.header_offset
        header = os.pread(self._descriptor, _LOCAL_HEADER.size, at)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
            raise self._damaged(f"member {entry.filename!r} has no header where its directory has it")
        _, name, extra = _LOCAL_HEADER.unpack(header)
        start = at + _LOCAL_HEADER.size + name + extra
        if start + entry.file_size > self._stop:
            raise self._damaged(f"member {entry.filename!r} ends behind it")
        return start, entry.file_size

    def tensor(self, place: TensorPlace) -> Tensor:
        """A tensor's elements, contiguous and in memory of their own; the part of its storage that it spans is read.

        Raises DamagedCheckpointError where the storage is missing or smaller than the tensor.
        """
        dtype: torch.dtype = getattr(torch, place.dtype)
        reach = sum((extent - 1) * step for extent, step in zip(place.shape, place.stride, strict=True))
        count = reach + 1 if math.prod(place.shape) else 0
        # A step of zero shows one element many times: a small file would become a tensor of any size.
        if place.offset + count > place.storage_elements or math.prod(place.shape) > max(count, 0):
            raise self._damaged(f"a tensor of shape {place.shape} and stride {place.stride} leaves its storage")
        entry = self._members.get(f"data/{place.key}")
        if entry is None:
            raise self._damaged(f"it has no storage {place.key!r}")
        start, size = self._span(entry)
        if size != place.storage_elements * dtype.itemsize:
            raise self._damaged(f"storage {place.key!r} has {size} bytes for {place.storage_elements} {dtype}")
        flat = torch.empty(count, dtype=dtype)
        self._fill(flat, start + place.offset * dtype.itemsize)
        return flat.as_strided(place.shape, place.stride).contiguous() if count else flat.reshape(place.shape)

    def verify(self, place: TensorPlace) -> list[str]:
        """Read a tensor's whole storage: what is wrong with it, empty if nothing is."""
        try:
            self.tensor(place)
        except CheckpointError as error:
            return [str(error)]
        entry = self._members[f"data/{place.key}"]
        start, size = self._span(entry)
        found = 0
        for at in range(start, start + size, PIECE_BYTES):
            found = zlib.crc32(os.pread(self._descriptor, min(PIECE_BYTES, start + size - at), at), found)
        # torch can be told to write no checksum, and then writes a zero.
        wrong = entry.CRC not in (0, found)
        return [f"{self.path}: storage {place.key!r} is not what was written: its CRC-32 differs"] if wrong else []

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
