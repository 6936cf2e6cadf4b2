"""Pickles and archives of torch.save (zip files of a pickle and of storages).

All pickles are read by a confined process (`confined.py`); `Sandbox` is the parent's side, and checks every reply. A
reply has the places of tensors, whose elements are then read from the file without a pickle. Archives are written one
tensor at a time.
"""

import io
import math
import os
import pickle
import signal
import socket
import time
import weakref
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError, NewFile, on_failure
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES, bytes_of, open_to_read, read_into
from megapipe.config.files import DECODING_ERRORS, decode_json
from megapipe.conversion import confined

REPLY_SECONDS = 300.0
"""Longest wait for a reply."""
MAX_REPLY_BYTES = 1 << 30


@dataclass(frozen=True)
class InertObject:
    """An object of another framework, without behavior. name: module and class. state: its state, if it is kept."""

    name: str
    state: Any = None


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a torch archive, whose storage is bytes `start` to `start + num_bytes` of the archive.

    dtype: name of the type in safetensors, or torch's name, without `torch.`, if checkpoints have no such type. crc32:
    checksum of the storage; 0 if the archive has none. offset, stride: in elements.
    """

    dtype: str
    start: int
    num_bytes: int
    crc32: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of elements of the storage from the tensor's first element to its last."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True))


class Sandbox:
    """The confined process. It receives open files from any source, and cannot open files or connections itself.

    Raises CheckpointError if `allowed`, the user's --allow-pickle, is false.
    """

    def __init__(self, allowed: bool, folder: Path) -> None:
        if not allowed:
            raise CheckpointError(
                f"{folder} is stored as pickles, which can carry code; add --allow-pickle to "
                "read it in a confined process that accepts a fixed list of classes"
            )
        confined.warm_up()
        self._channel, child_end = socket.socketpair()
        process = os.fork()
        if process == 0:
            confined.serve(child_end)
        child_end.close()
        self._end = weakref.finalize(self, _end, process, self._channel)

    def load(self, descriptor: int, start: int, stop: int, origin: str, *, archive: bool) -> Any:
        """Return the content of the pickle in bytes `start` to `stop` of an open file.

        The content consists of plain values, InertObject and TensorPlace; a dict with keys of other types is a list of
        pairs. archive: true for an archive of torch.save, false for a bare pickle. origin: name for error messages.
        Raises CheckpointError, with the class, if the pickle is refused, DamagedCheckpointError if it cannot be read.
        """
        content = self._exchange(descriptor, confined.REQUEST.pack(archive, start, stop), origin)
        reply = decode_json(
            content, f"{origin} is not read: the reply of the process that reads pickles", CheckpointError
        )
        match reply:
            case {"value": value}:
                try:
                    return _decoded(value, stop - start)
                except DECODING_ERRORS as error:
                    raise CheckpointError(f"{origin} is not read: {error}") from error
            case {"refused": str(why)}:
                raise CheckpointError(f"{origin} is not read: {why}")
            case {"damaged": str(why)}:
                raise DamagedCheckpointError(
                    f"{origin} is not read: it is damaged, or of another format: {why}", "unreadable"
                )
        raise CheckpointError(f"{origin} is not read: the process that reads pickles gave no answer")

    def close(self) -> None:
        """End the process."""
        self._end()

    def _exchange(self, descriptor: int, request: bytes, origin: str) -> bytes:
        deadline = time.monotonic() + REPLY_SECONDS
        try:
            socket.send_fds(self._channel, [request], [descriptor])
            (length,) = confined.LENGTH.unpack(self._receive(confined.LENGTH.size, deadline))
            if length <= MAX_REPLY_BYTES:
                return self._receive(length, deadline)
            problem = f"gave an answer of {length:,} bytes; at most {MAX_REPLY_BYTES:,} are read"
        except TimeoutError:
            problem = f"took longer than {REPLY_SECONDS:g} s"
        except OSError:
            problem = "ended, or was stopped at one of its limits"
        self.close()
        raise CheckpointError(f"{origin} is not read: the process that reads pickles {problem}")

    def _receive(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._channel.recv(min(size - len(content), 1 << 20))
            if not part:
                raise ConnectionError
            content += part
        return bytes(content)


def _end(process: int, channel: socket.socket) -> None:
    channel.close()
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _decoded(value: Any, archive_bytes: int) -> Any:
    """Decode the value in a reply. Raises one of DECODING_ERRORS for an invalid reply."""
    if isinstance(value, list):
        return [_decoded(each, archive_bytes) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(each, archive_bytes) for each in content)
    if kind == "dict":
        pairs = [(_decoded(key, archive_bytes), _decoded(each, archive_bytes)) for key, each in content]
        plain = all(isinstance(key, str | int | float | bool | None) for key, _ in pairs)
        return dict(pairs) if plain else pairs
    if kind == "tensor":
        return _place(content, archive_bytes)
    if kind == "record":
        name, state = content
        return InertObject(str(name), _decoded(state, archive_bytes))
    return InertObject(str(content))


def _place(content: dict[str, Any], archive_bytes: int) -> TensorPlace:
    """Return the place of a tensor. Raises ValueError unless it is inside its storage, and the storage inside the
    archive."""
    shape, stride = tuple(content.pop("shape")), tuple(content.pop("stride"))
    place = TensorPlace(**content, shape=shape, stride=stride)
    numbers = (place.start, place.num_bytes, place.crc32, place.offset, *shape, *stride)
    if place.dtype not in confined.DTYPES or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("it holds a tensor of an unknown type, or with a negative size, stride or offset")
    if place.start + place.num_bytes > archive_bytes:
        raise ValueError("it holds a tensor whose storage ends after the file")
    item = getattr(torch, place.dtype).itemsize
    if place.num_bytes % item or (place.offset + place.span) * item > place.num_bytes:
        raise ValueError(f"it holds a tensor of shape {shape} and stride {stride} that leaves its storage")
    return replace(place, dtype=DTYPE_NAMES.get(place.dtype, place.dtype))


DTYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
"""Maps torch's name of a type, without `torch.`, to its name in safetensors, for the types of checkpoints."""


class Archive:
    """An archive of torch.save, at bytes `start` to `stop` of a file. value: the content of its pickle.

    Raises DamagedCheckpointError for an incomplete archive, CheckpointError for a pickle that is refused.
    """

    def __init__(self, path: Path, sandbox: Sandbox, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        self._file = open_to_read(path)
        with on_failure(self.close):
            size = os.fstat(self._file.fileno()).st_size
            self._start, stop = start, size if stop is None else stop
            if not 0 <= start <= stop <= size:
                raise self._damaged(f"it has {size} bytes, and bytes {start} to {stop} are requested")
            self.value = sandbox.load(self._file.fileno(), start, stop, str(path), archive=True)

    def _damaged(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path} is not a readable torch archive: {why}", "unreadable")

    def tensor(self, place: TensorPlace) -> Tensor:
        """Return a tensor's elements, contiguous, in newly allocated memory. Only the part of its storage that it uses
        is read.

        Raises DamagedCheckpointError if the file ends early, and if elements are repeated, because a small file could
        then become a tensor of any size.
        """
        if math.prod(place.shape) > place.span:
            raise self._damaged(f"a tensor of shape {place.shape} and stride {place.stride} repeats elements")
        dtype: torch.dtype = DTYPES.get(place.dtype) or getattr(torch, place.dtype)
        flat = torch.empty(place.span, dtype=dtype)
        first = self._start + place.start + place.offset * dtype.itemsize
        if not read_into(self._file, bytes_of(flat), first):
            raise self._damaged("it ends inside a storage")
        return flat.as_strided(place.shape, place.stride).contiguous() if place.span else flat.reshape(place.shape)

    def verify(self, place: TensorPlace) -> list[str]:
        """Read a tensor's whole storage and return its problems; an empty list if there are none."""
        try:
            self.tensor(place)
        except CheckpointError as error:
            return [str(error)]
        first = self._start + place.start
        checksum = 0
        for position in range(first, first + place.num_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, first + place.num_bytes - position)
            content = os.pread(self._file.fileno(), count, position)
            checksum = zlib.crc32(content, checksum)
        # torch can be configured to write no checksums, and then writes zeros.
        if place.crc32 in (0, checksum):
            return []
        return [f"{self.path}: the storage at byte {first:,} has changed since it was written: its CRC-32 differs"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Slot:
    """Placeholder in a pickled value for a tensor that is written later. key: unique name of its storage."""

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
    """A new file for torch's writer of archives.

    failure: the error of the disk. It is stored and not raised, because torch's writer aborts the process if its
    destructor, which completes the file, meets an exception.
    """

    def __init__(self, path: Path) -> None:
        self.file = NewFile(path)
        self.failure: CheckpointError | None = None

    def write(self, content: Any) -> int:
        """Write all of `content`, or nothing after a failure. Return the size of `content`."""
        view = memoryview(content)
        if self.failure is None:
            try:
                self.file.write(view)
            except CheckpointError as error:
                self.failure = error
        return view.nbytes


class ArchiveWriter:
    """Writes an archive for torch.load, one tensor at a time. value: the content of its pickle, with a Slot for each
    tensor.

    Every method raises CheckpointError if the disk refuses a write.
    """

    def __init__(self, path: Path, value: Any) -> None:
        content = io.BytesIO()
        _Pickler(content, protocol=2).dump(value)
        self._output = _Output(path)
        self._writer = torch._C.PyTorchFileWriter(self._output)  # type: ignore[call-overload]  # it needs only `write`
        self._record("data.pkl", content.getvalue(), len(content.getvalue()))
        self._record("byteorder", b"little", len(b"little"))

    def add(self, key: str, values: Tensor) -> None:
        """Write the elements of the Slot of this key."""
        contiguous = values.contiguous()
        if contiguous.storage_offset():  # the writer starts at the beginning of the storage
            contiguous = contiguous.clone()
        self._record(f"data/{key}", contiguous.untyped_storage(), contiguous.nbytes)

    def close(self) -> None:
        """Complete the file and make it durable."""
        self._writer.write_end_of_file()
        self._check()
        self._output.file.close()

    def abandon(self) -> None:
        """Close the file without completing it, because it will be removed."""
        self._output.file.abandon()

    def _record(self, name: str, content: Any, size: int) -> None:
        self._writer.write_record(name, content, size)
        self._check()

    def _check(self) -> None:
        if self._output.failure is not None:
            self.abandon()
            raise self._output.failure


class PickledTensors:
    """Reads a `.bin` file one tensor at a time, with the methods of `TensorReader`.

    entries: its floating-point tensors by key.

    Raises CheckpointError for a file that cannot be read, or that names a class that is not allowed.
    """

    def __init__(self, path: Path, sandbox: Sandbox) -> None:
        self._archive = Archive(path, sandbox)
        value = self._archive.value
        if not isinstance(value, dict):
            self.close()
            raise DamagedCheckpointError(f"{path} does not contain a state dict of tensors by name", "unreadable")
        places = [item for item in value.items() if isinstance(item[1], TensorPlace)]
        self.entries = {str(key): place for key, place in places if place.dtype in DTYPES}

    def entry(self, key: str) -> TensorPlace:
        """Return the place of a tensor. Raises DamagedCheckpointError if there is no such floating-point tensor."""
        if key not in self.entries:
            raise DamagedCheckpointError(f"{self._archive.path} has no floating-point tensor {key!r}", "unreadable")
        return self.entries[key]

    def whole(self, key: str) -> Tensor:
        """Return a tensor in newly allocated memory."""
        return self._archive.tensor(self.entry(key))

    def verify(self, key: str) -> list[str]:
        """Read a tensor's storage and return its problems; an empty list if there are none."""
        return self._archive.verify(self.entry(key))

    def close(self) -> None:
        """Close the file."""
        self._archive.close()
