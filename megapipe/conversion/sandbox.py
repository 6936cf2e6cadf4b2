"""The parent's side of the confined process (`confined.py`), which reads all pickles. Every reply is checked."""

import math
import os
import signal
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError
from megapipe.config.untrusted import DECODING_ERRORS, decode_json
from megapipe.conversion import confined
from megapipe.conversion.confined import DTYPES

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

    dtype: torch's name of the type, without `torch.`. crc32: checksum of the storage; 0 if the archive has none.
    offset, stride: in elements.
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
                f"{folder} is stored as pickles, a format that can carry code; add --allow-pickle to read it in a "
                "confined process that accepts a fixed list of classes and runs nothing"
            )
        confined.warm_up()
        self._channel, theirs = socket.socketpair()
        process = os.fork()
        if process == 0:
            confined.serve(theirs)
        theirs.close()
        self._end = weakref.finalize(self, _end, process, self._channel)

    def load(self, descriptor: int, start: int, stop: int, origin: str, *, archive: bool) -> Any:
        """Return the content of the pickle in bytes `start` to `stop` of an open file.

        The content consists of plain values, InertObject and TensorPlace; a dict with keys of other types is a list of
        pairs. archive: true for an archive of torch.save, false for a bare pickle. origin: name for error messages.
        Raises CheckpointError, with the class, if the pickle is refused, DamagedCheckpointError if it cannot be read.
        """
        content = self._exchange(descriptor, confined.REQUEST.pack(archive, start, stop), origin)
        reply = decode_json(content, f"{origin} is not read: the reply of the process that reads pickles", _failure)
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
            (length,) = confined.LENGTH.unpack(self._received(confined.LENGTH.size, deadline))
            if length <= MAX_REPLY_BYTES:
                return self._received(length, deadline)
            problem = f"gave an answer of {length:,} bytes; at most {MAX_REPLY_BYTES:,} are read"
        except TimeoutError:
            problem = f"took longer than {REPLY_SECONDS:g} s"
        except OSError:
            problem = "ended, or was stopped at one of its limits"
        self.close()
        raise CheckpointError(f"{origin} is not read: the process that reads pickles {problem}")

    def _received(self, size: int, deadline: float) -> bytes:
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


def _failure(message: str) -> CheckpointError:
    return CheckpointError(message)


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
    if place.dtype not in DTYPES or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("it holds a tensor of an unknown type, or with a negative size, stride or offset")
    if place.start + place.num_bytes > archive_bytes:
        raise ValueError("it holds a tensor whose storage ends after the file")
    item = getattr(torch, place.dtype).itemsize
    if place.num_bytes % item or (place.offset + place.span) * item > place.num_bytes:
        raise ValueError(f"it holds a tensor of shape {shape} and stride {stride} that leaves its storage")
    return place
