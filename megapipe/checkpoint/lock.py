"""One job at a time in the folder of a run."""

import errno
import fcntl
import json
import os
import uuid
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.storage import DISK, StorageWriter, explained
from megapipe.config.untrusted import DECODING_ERRORS, read_json

LOCK = ".lock"


class DirectoryLock:
    """An advisory lock on a directory, which the system releases when the process ends, however it ends.

    The file stays: removing it would let a third job lock a new file while a second one holds the old.

    Attributes:
        word: random text that identifies this lock. It is in the lock's file, so that `word_in` reads it on any host.
    """

    def __init__(self, directory: Path, storage: StorageWriter = DISK) -> None:
        """Create the directory where it is missing, durably, and lock it. A refused lock changes no file.

        Raises CheckpointError naming the holder when another job has it, or when the folder cannot be written.
        """
        path = directory / LOCK
        self.word = uuid.uuid4().hex
        self._kept = False
        try:
            make_durable_folder(directory, storage)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritable(directory, error) from error
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
        holder = json.dumps({"host": os.uname().nodename, "process": os.getpid(), "word": self.word})
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
            os.fsync(self._descriptor)  # so that other hosts can read it
        except OSError as error:
            os.close(self._descriptor)
            raise _unwritable(directory, error) from error

    def keep(self) -> None:
        """Hold the lock until the process ends, since a thread still writes; `release` then does nothing."""
        self._kept = True

    def release(self) -> None:
        """Let another job in."""
        if not self._kept:
            os.close(self._descriptor)


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    reason = explained(error, directory)
    if reason == error.strerror:  # the other errors come with a remedy
        reason += "; choose a folder in which files can be created"
    return CheckpointError(f"training.directory {directory} cannot be written: {reason}")


def make_durable_folder(directory: Path, storage: StorageWriter = DISK) -> None:
    """Create a folder and its parents where they are missing, so that they survive a power failure."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        storage.flush_folder(folder.parent)


def word_in(directory: Path) -> str | None:
    """Return the word in the lock file of a directory, or None if there is no such file."""
    try:
        return str(read_json(directory / LOCK, ValueError)["word"])
    except (OSError, *DECODING_ERRORS):
        return None


def _holder(path: Path) -> str:
    try:
        holder = read_json(path, ValueError)
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, *DECODING_ERRORS):
        return "another job"
