"""One job at a time on one directory of checkpoints."""

import errno
import fcntl
import json
import os
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.storage import DISK, StorageWriter, explained
from megapipe.config.untrusted import DECODING_ERRORS, read_json

LOCK = ".lock"


class DirectoryLock:
    """An advisory lock on a directory, which the system takes back when the process ends, however it ends.

    The file stays: removing it would let a third job lock a new file while a second one holds the old.
    """

    def __init__(self, directory: Path, storage: StorageWriter = DISK) -> None:
        """Create the directory where it is missing, durably, and lock it.

        Raises CheckpointError naming the holder when another job has it, or when the folder cannot be written.
        """
        path = directory / LOCK
        try:
            missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                storage.flush_folder(folder.parent)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explained(error, directory)}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(path)
            os.close(self._descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(f"cannot lock {path}: {error.strerror}") from error
            raise CheckpointError(
                f"{directory} is in use by {holder}; stop that job, or give this one another training.directory"
            ) from None
        holder = json.dumps({"host": os.uname().nodename, "process": os.getpid()})
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise CheckpointError(f"cannot write {path}: {explained(error, directory)}") from error

    def release(self) -> None:
        """Let another job in."""
        os.close(self._descriptor)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path, ValueError)
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, *DECODING_ERRORS):
        return "another job"
