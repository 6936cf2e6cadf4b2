"""Access to the disk: errors on which all ranks agree, all changes of a save, and checks of untrusted folders.

`gathered`, `agreed` and `on_first_rank` raise the error of one rank on all ranks, which would otherwise wait for it.

Every system call by which a save changes the disk is in one class, so that a test can make each of them fail.

Untrusted folders: names must not leave the folder, and sizes are checked before memory is allocated.
docs/conversion.md lists the rules; each has a hostile fixture in tests/conversion.
"""

import errno
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megapipe.config import InputError, files
from megapipe.config.files import flush_folder
from megapipe.parallel.groups import Group


class CheckpointError(InputError, ValueError):
    """A checkpoint that cannot be written, read or used. The message names the file or tensor, and how to fix the
    problem."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes differ from those that were saved. Its folder is renamed; an older one may be intact.

    reason: one word for the new folder name, such as `checksum`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedCheckpointError"], tuple[str, str]]:
        return DamagedCheckpointError, (str(self), self.reason)


T = TypeVar("T")


def gathered(world: Group, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return, on every rank, the values of all ranks in rank order.

    Raises CheckpointError, the same on every rank, if `work` failed on any rank. It is a DamagedCheckpointError if
    the lowest failing rank raised one.
    """
    failure: CheckpointError | None = None
    cause: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as error:
        # If one rank raised its error here, the other ranks would wait for it.
        failure, cause = as_all_ranks_raise_it(error, world), error
    results: list[tuple[CheckpointError | None, T]] = world.all_gather_object((failure, value))
    for failed, _ in results:
        if failed is not None:
            raise failed from cause
    return [value for _, value in results]


def agreed(world: Group, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's value after all ranks succeeded. See `gathered` for errors."""
    mine: list[T] = []
    gathered(world, lambda: mine.append(work()))
    return mine[0]


def on_first_rank(world: Group, work: Callable[[], T]) -> T:
    """Run `work` only on rank 0 and return its value, which must be small, on all ranks. See `gathered` for errors."""
    values: list[list[T]] = gathered(world, lambda: [work()] if world.rank == 0 else [])
    return values[0][0]


def as_all_ranks_raise_it(error: BaseException, world: Group) -> CheckpointError:
    """Return this rank's error in the form that every rank raises: with the rank and its host if there are several
    ranks."""
    message = str(error) if world.size == 1 else f"{error} (rank {world.rank}, on {os.uname().nodename})"
    if isinstance(error, DamagedCheckpointError):
        return DamagedCheckpointError(message, error.reason)
    if isinstance(error, CheckpointError):
        return CheckpointError(message)
    return CheckpointError(f"{type(error).__name__}: {message}")


class StorageWriter:
    """Changes the disk. A write is durable after `flush`, and a file's name is durable after `flush_folder`."""

    def make_folder(self, path: Path) -> None:
        """Create one folder; its parent must exist."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a file that must not exist and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write some of `content` and return the number of bytes."""
        return os.write(descriptor, content)

    def flush(self, descriptor: int) -> None:
        """Wait until the file's content would survive a power failure."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def flush_folder(self, path: Path) -> None:
        """Wait until the names in a folder would survive a power failure."""
        flush_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder within its parent folder."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


DISK = StorageWriter()


@contextmanager
def writing(path: Path, folder: Path | None = None, *, verb: str = "write") -> Iterator[None]:
    """Raise CheckpointError for an OSError in the block, with the path, the system's message and how to fix it.

    folder: the message describes its disk; by default the parent of `path`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {verb} {path}: {explained(error, folder or path.parent)}") from error


@contextmanager
def on_failure(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` if the block raises any exception, including Ctrl-C."""
    try:
        yield
    except BaseException:
        undo()
        raise


class NewFile:
    """A new file, which is written from its beginning. Raises CheckpointError if the disk refuses a change."""

    def __init__(self, path: Path, storage: StorageWriter = DISK) -> None:
        self.path, self._storage = path, storage
        with writing(path):
            self._descriptor = storage.create(path)

    def write(self, content: memoryview) -> None:
        """Write all of `content`; a single system call may write only a part of it."""
        with writing(self.path):
            while content:
                content = content[self._storage.write(self._descriptor, content) :]

    def close(self) -> None:
        """Make the content durable, and close the file."""
        with writing(self.path):
            try:
                self._storage.flush(self._descriptor)
            finally:
                self._close()

    def abandon(self) -> None:
        """Close the file, which will be removed. Idempotent, also after `close`."""
        with suppress(OSError):  # the error that came before it is reported
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._storage.close(descriptor)


def write_file(storage: StorageWriter, path: Path, content: bytes) -> None:
    """Write a new file, and flush it and its name.

    Raises CheckpointError with the file, the system's message and, for a full disk, the free space.
    """
    file = NewFile(path, storage)
    with on_failure(file.abandon):
        file.write(memoryview(content))
    file.close()
    with writing(path):
        storage.flush_folder(path.parent)


def remove_tree(storage: StorageWriter, path: Path) -> None:
    """Remove a file, a symbolic link (never what it points to), or a folder with everything in it."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        storage.remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(storage, entry)
    storage.remove_folder(path)


def free_space(folder: Path) -> str:
    """Return a description of the free space of the disk on which `folder` is, or would be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    # Some file systems, for example Btrfs, have no limit on the number of files and report zero.
    if disk.f_files and not disk.f_favail:
        return "no more files fit there"
    return f"{disk.f_bavail * disk.f_frsize:,} bytes are free there"


def explained(error: OSError, folder: Path) -> str:
    """Return the system's message about a failed change in `folder`, and how to fix it."""
    message = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{message}; {free_space(folder)}: free space, or write to a larger disk; older files are untouched"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{message}; make {folder} writable for this user, or write to another folder"
    return message if folder.is_dir() else f"{message}; {folder} is not a folder: write to another one"


MAX_SHARDS = 10_000
"""Largest number of files in an index."""
MAX_TENSORS = 1_000_000
"""Largest number of tensors in an index."""


def inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in a folder.

    Raises CheckpointError for a name that contains a path, and for a link to a file outside the folder.
    """
    if name in ("", "..") or name != Path(name).name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{folder} names {reprlib.repr(name)}, which is not in its folder; it is not read")
    path = folder / name
    # The hub's client creates links from snapshots/<revision> to the folder blobs next to snapshots.
    real, root = path.resolve(), folder.resolve()
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if path.is_symlink() and not any(place in real.parents for place in (root, *blobs)):
        raise CheckpointError(f"{path} is a link that leads out of its folder, to {real}; copy the file itself here")
    return path


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if the file is unreadable or does not contain one."""
    try:
        content = files.read_json(path, CheckpointError)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; choose a folder with this file") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return content


def check_counts(path: Path, files: int, tensors: int) -> None:
    """Raise CheckpointError for an index with too many files or tensors."""
    if files > MAX_SHARDS:
        raise CheckpointError(f"{path} names {files:,} files; at most {MAX_SHARDS:,} are read")
    if tensors > MAX_TENSORS:
        raise CheckpointError(f"{path} names {tensors:,} tensors; at most {MAX_TENSORS:,} are read")
