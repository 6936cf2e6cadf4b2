"""Disks that fail: the process is killed at any operation, the power goes, or the system refuses."""

import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megapipe.checkpoint.storage import StorageWriter


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may run, so it is no Exception."""


class CountingDisk(StorageWriter):
    """Calls `before` with the number and the name of every operation; a write is told with what it is to write."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def before(self, number: int, operation: str, perform: Callable[[], object]) -> None:
        """Called instead of nothing ahead of operation `number`, counted from 0; `perform` would carry it out."""

    def _count(self, operation: str, perform: Callable[[], object]) -> None:
        self.operations.append(operation)
        self.before(len(self.operations) - 1, operation, perform)

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", lambda: super(CountingDisk, self).make_folder(path))
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._count("create", lambda: super(CountingDisk, self).create(path))
        return super().create(path)

    def write(self, descriptor: int, content: memoryview) -> int:
        half = content[: len(content) // 2]
        self._count("write", lambda: super(CountingDisk, self).write(descriptor, half))
        return super().write(descriptor, content)

    def flush(self, descriptor: int) -> None:
        self._count("flush", lambda: super(CountingDisk, self).flush(descriptor))
        super().flush(descriptor)

    def close(self, descriptor: int) -> None:
        self._count("close", lambda: super(CountingDisk, self).close(descriptor))
        super().close(descriptor)

    def flush_folder(self, path: Path) -> None:
        self._count("flush_folder", lambda: super(CountingDisk, self).flush_folder(path))
        super().flush_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", lambda: super(CountingDisk, self).rename(source, target))
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove", lambda: super(CountingDisk, self).remove(path))
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", lambda: super(CountingDisk, self).remove_folder(path))
        super().remove_folder(path)


class KilledDisk(CountingDisk):
    """The process dies at one operation: before it, or after it (of a write, after half). Nothing happens later."""

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
    """The system refuses one operation with an error, after half of it where it is a write; later ones work."""

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


class PowerlessDisk(StorageWriter):
    """A disk that forgets, when the power goes, what had not been flushed. The ranks of one machine share it.

    A removal is durable at once and a change of a name is not: of the two orders in which a disk may write them, that
    is the one which would leave half a checkpoint under its old name.

    flushes, flushes_folders: whether the disk obeys; one that does not shows that the test would notice.
    """

    def __init__(self, at: int, *, flushes: bool = True, flushes_folders: bool = True) -> None:
        self._left = at
        self._flushes = flushes
        self._flushes_folders = flushes_folders
        self._one_at_a_time = threading.Lock()
        self._descriptors: dict[int, Path] = {}
        self._contents: set[Path] = set()
        self._files: set[Path] = set()
        self._folders: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def lose(self, loss: Loss) -> None:
        """The power goes, and with it what was not flushed.

        That is half of each file's content; for `files` also the names of files, for `all` those of folders too.
        """
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

    def make_folder(self, path: Path) -> None:
        with self._one_at_a_time:
            self._spend()
            super().make_folder(path)
            self._folders.add(path)

    def create(self, path: Path) -> int:
        with self._one_at_a_time:
            self._spend()
            descriptor = super().create(path)
            self._descriptors[descriptor] = path
            self._files.add(path)
            return descriptor

    def write(self, descriptor: int, content: memoryview) -> int:
        with self._one_at_a_time:
            self._spend()
            self._contents.add(self._descriptors[descriptor])
            return super().write(descriptor, content)

    def flush(self, descriptor: int) -> None:
        with self._one_at_a_time:
            self._spend()
            if self._flushes:
                self._contents.discard(self._descriptors[descriptor])

    def flush_folder(self, path: Path) -> None:
        with self._one_at_a_time:
            self._spend()
            if self._flushes_folders:
                self._files = {each for each in self._files if each.parent != path}
                self._folders = {each for each in self._folders if each.parent != path}
                self._renames = [each for each in self._renames if each[0].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        with self._one_at_a_time:
            self._spend()
            super().rename(source, target)
            self._renames.append((source, target))
            self._contents, self._files, self._folders = (
                {target / path.relative_to(source) if path.is_relative_to(source) else path for path in paths}
                for paths in (self._contents, self._files, self._folders)
            )

    def remove(self, path: Path) -> None:
        with self._one_at_a_time:
            self._spend()
            super().remove(path)
            self._contents.discard(path)
            self._files.discard(path)

    def remove_folder(self, path: Path) -> None:
        with self._one_at_a_time:
            self._spend()
            super().remove_folder(path)
            self._folders.discard(path)

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed("power failure")


@contextmanager
def no_larger_files(limit: int) -> Iterator[None]:
    """The system refuses to make a file larger than `limit` bytes, for real."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
