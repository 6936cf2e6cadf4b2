"""Every system call by which a save changes the disk, in one class, so that a test can fail each of them in turn."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError
from megapipe.data.durable import flush_folder


class StorageWriter:
    """The disk. A write is durable once `flush` returned, a name once `flush_folder` of its folder did."""

    def make_folder(self, path: Path) -> None:
        """Create one folder; its parent exists."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a file that must not exist and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write some of `content` and return how many bytes that was."""
        return os.write(descriptor, content)

    def flush(self, descriptor: int) -> None:
        """Return once the file's content would survive a power failure."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def flush_folder(self, path: Path) -> None:
        """Return once the names in a folder would survive a power failure."""
        flush_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in the same folder."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


DISK = StorageWriter()


def write_file(storage: StorageWriter, path: Path, parts: Iterable[memoryview]) -> int:
    """Write a new file and flush it and its name; returns its bytes.

    Raises CheckpointError naming the file, what the system said and, for a full disk, what is free.
    """
    size = 0
    try:
        descriptor = storage.create(path)
        try:
            for part in parts:
                size += len(part)
                while part:
                    part = part[storage.write(descriptor, part) :]
            storage.flush(descriptor)
        finally:
            storage.close(descriptor)
        storage.flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {explained(error, path.parent)}") from error
    return size


def remove_tree(storage: StorageWriter, path: Path) -> None:
    """Remove a file, a symbolic link (never what it points to), or a folder with everything in it."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        storage.remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(storage, entry)
    storage.remove_folder(path)


def free_space(folder: Path) -> str:
    """Describe the free space of the disk on which `folder` is, or would be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    # Some file systems, Btrfs for example, have no limit of files and report zero of them.
    if disk.f_files and not disk.f_favail:
        return "no more files fit there"
    return f"{disk.f_bavail * disk.f_frsize:,} bytes are free there"


def explained(error: OSError, folder: Path) -> str:
    """Return the system's message about a failed change in `folder`, and how to fix it."""
    message = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{message}; {free_space(folder)}: free some space, or write to a larger disk; older files are untouched"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{message}; make {folder} writable for this user, or write to another folder"
    return message
