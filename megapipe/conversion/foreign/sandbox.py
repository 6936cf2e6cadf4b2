"""Pickles described by a confined process (`unpickler.py`), never read by this one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.conversion.foreign import unpickler

_ENVIRONMENT = ("LD_LIBRARY_PATH",)
"""What the interpreter may need to start; nothing else of the environment is passed on."""


@dataclass(frozen=True)
class Record:
    """An object of another framework, inert. name: module and class. args, state: what it was made from."""

    name: str
    args: tuple[Any, ...]
    state: Any


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a torch archive. key: its storage's. offset, stride: in elements. storage_elements: of its storage.

    dtype: torch's name of the type, without `torch.`.
    """

    key: str
    dtype: str
    storage_elements: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Sandbox:
    """The confined process. Its pickles may come from anywhere: it can open no file and no connection.

    Raises CheckpointError unless `allowed`, the user's --allow-pickle.
    """

    def __init__(self, allowed: bool, folder: Path) -> None:
        if not allowed:
            raise CheckpointError(
                f"{folder} is read from pickles, a format that can carry code; say --allow-pickle to have them read "
                "in a confined process that knows a written list of classes and runs nothing"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", unpickler.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            cwd="/",
        )

    def load(self, content: bytes, origin: str) -> Any:
        """What a pickle holds: plain values, Record and TensorPlace; a dict with other keys as a list of pairs.

        origin: told in errors. Raises CheckpointError naming the class for a pickle that is refused.
        """
        if len(content) > unpickler.MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{origin} is a pickle of {len(content):,} bytes; at most {unpickler.MAX_PICKLE_BYTES:,} are read"
            )
        reply = self._exchange(content)
        if reply is None:
            code = self._process.wait()
            raise CheckpointError(f"{origin} is not read: the process that reads pickles ended with exit code {code}")
        if "refused" in reply:
            raise CheckpointError(f"{origin} is not read: {reply['refused']}")
        return _decoded(reply["value"])

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _exchange(self, content: bytes) -> Mapping[str, Any] | None:
        """The reply; None where the process is gone."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(unpickler.LENGTH.pack(len(content)) + content)
            requests.flush()
        except BrokenPipeError:
            return None
        prefix = replies.read(unpickler.LENGTH.size)
        if len(prefix) < unpickler.LENGTH.size:
            return None
        (length,) = unpickler.LENGTH.unpack(prefix)
        text = replies.read(length)
        found: Mapping[str, Any] | None = json.loads(text) if len(text) == length else None
        return found


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(each) for each in content)
    if kind == "dict":
        pairs = [(_decoded(key), _decoded(each)) for key, each in content]
        plain = all(isinstance(key, str | int | float | bool | None) for key, _ in pairs)
        return dict(pairs) if plain else pairs
    if kind == "tensor":
        shape, stride = tuple(content.pop("shape")), tuple(content.pop("stride"))
        return TensorPlace(**content, shape=shape, stride=stride)
    if kind == "record":
        name, args, state = content
        return Record(name, tuple(_decoded(args)), _decoded(state))
    return f"<{content} bytes>"
