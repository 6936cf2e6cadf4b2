"""Disks that fail: the process is killed at any operation, the power fails, or the system refuses."""

import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from megapipe.checkpoint.storage import StorageWriter
from megapipe.training.loop import checkpoints


def disk_before(operation: str, call: Callable[..., object]) -> StorageWriter:
    """Return a disk that calls a function with the arguments of each operation of this name, before it."""
    disk = StorageWriter()
    perform = getattr(disk, operation)

    def performed(*arguments: Any) -> Any:
        call(*arguments)
        return perform(*arguments)

    setattr(disk, operation, performed)
    return disk


def save_on(disk: StorageWriter, patch: pytest.MonkeyPatch) -> None:
    """Let runs save on a disk."""
    for name in ("BackgroundSaver", "save"):
        patch.setattr(checkpoints, name, partial(getattr(checkpoints, name), storage=disk))


OPERATIONS = tuple(name for name in vars(StorageWriter) if not name.startswith("_"))


class Killed(BaseException):
    """Replaces SIGKILL: no handler of the code under test may run, so it is not an Exception."""


class CountingDisk(StorageWriter):
    """Lists all operations, and calls `before` and `after` around each of them."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.lock: Any = nullcontext()

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        """Called before operation `number`, counted from 0; `perform` carries it out (half of a write)."""

    def after(self, operation: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Called after an operation."""


def _counted(operation: str) -> Callable[..., Any]:
    real = getattr(StorageWriter, operation)

    def run(disk: CountingDisk, *arguments: Any) -> Any:
        half = (arguments[0], arguments[1][: len(arguments[1]) // 2]) if operation == "write" else arguments
        with disk.lock:
            disk.operations.append(operation)
            disk.before(len(disk.operations) - 1, operation, lambda: real(disk, *half))
            result = real(disk, *arguments)
            disk.after(operation, arguments, result)
            return result

    return run


for _name in OPERATIONS:
    setattr(CountingDisk, _name, _counted(_name))


class KilledDisk(CountingDisk):
    """The process dies before one operation, or after it (a write: after half). Nothing happens later."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self._at = at
        self._after = after

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        if number == self._at and self._after:
            perform()
        if number >= self._at:
            raise Killed(f"{operation}, operation {number}")


class RefusingDisk(CountingDisk):
    """The system refuses one operation with an error (a write: after half of it); later ones work."""

    def __init__(self, at: int, error: int) -> None:
        super().__init__()
        self._at = at
        self._error = error

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        if number == self._at:
            if operation in ("write", "close"):
                perform()
            raise OSError(self._error, os.strerror(self._error))


Loss = Literal["content", "files", "all"]


class PowerlessDisk(CountingDisk):
    """A disk that loses, when the power fails, what had not been flushed. The ranks of one machine share it.

    A removal is durable at once and a change of a name is not: of the two orders in which a disk may write them, this
    one would leave half a checkpoint under its old name.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.lock = threading.Lock()
        self._descriptors: dict[int, Path] = {}
        self._contents: set[Path] = set()
        self._files: set[Path] = set()
        self._folders: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def lose(self, loss: Loss) -> None:
        """Lose what was not flushed: half of each file's content, with `files` also the names of files, with `all`
        also those of folders."""
        for path in self._contents:
            half = path.read_bytes()[: path.stat().st_size // 2]
            path.write_bytes(half + bytes(path.stat().st_size - len(half)))
        if loss != "content":
            for path in self._files:
                path.unlink()
        if loss == "all":
            for source, target in reversed(self._renames):
                if target.exists():
                    target.rename(source)
                self._folders = {source if path == target else path for path in self._folders}
            for path in self._folders:
                shutil.rmtree(path)

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        if number >= self._at and operation != "close":
            raise Killed("power failure")

    def after(self, operation: str, arguments: tuple[Any, ...], result: Any) -> None:
        path = arguments[0]
        match operation:
            case "make_folder":
                self._folders.add(path)
            case "create":
                self._descriptors[result] = path
                self._files.add(path)
            case "write":
                self._contents.add(self._descriptors[path])
            case "flush":
                self._contents.discard(self._descriptors[path])
            case "flush_folder":
                self._files = {each for each in self._files if each.parent != path}
                self._folders = {each for each in self._folders if each.parent != path}
                self._renames = [each for each in self._renames if each[0].parent != path]
            case "rename":
                self._renames.append((path, arguments[1]))
                self._contents, self._files, self._folders = (
                    {arguments[1] / each.relative_to(path) if each.is_relative_to(path) else each for each in paths}
                    for paths in (self._contents, self._files, self._folders)
                )
            case "remove" | "remove_folder":
                for paths in (self._contents, self._files, self._folders):
                    paths.discard(path)


@contextmanager
def no_larger_files(limit: int) -> Iterator[None]:
    """Make the system refuse files larger than `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
