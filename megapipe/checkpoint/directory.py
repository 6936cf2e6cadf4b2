"""A run's directory of checkpoints, which one job at a time may use. Each step has a folder, renamed when complete.

step-00000010/                complete, or damaged afterwards
step-00000010.bad-checksum/   was damaged when it was loaded, and was set aside
.step-00000010.partial/       being written, or left over from a save that was killed
.step-00000010.deleted/       being deleted
"""

import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megapipe.checkpoint.manifest import MANIFEST, check_files, read_manifest
from megapipe.checkpoint.storage import (
    DISK,
    CheckpointError,
    DamagedCheckpointError,
    StorageWriter,
    explained,
    remove_tree,
    write_file,
    writing,
)
from megapipe.config.files import DECODING_ERRORS, read_json

_STEP = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"\.step-[0-9]{8,}\.(partial|deleted)")
_SET_ASIDE = re.compile(r"step-[0-9]{8,}\.bad-.*")


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written before it is complete."""
    return directory / f".step-{step:08d}.partial"


def steps(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a directory by step, ascending; an empty dictionary if the directory does not
    exist."""
    return dict(sorted((int(match[1]), path) for path, match in _matching(directory, _STEP)))


def set_aside(directory: Path) -> list[Path]:
    """Return the checkpoints that were damaged when they were loaded."""
    return sorted(path for path, _ in _matching(directory, _SET_ASIDE))


def newest_valid(directory: Path, say: Callable[[str], None] = print) -> Path | None:
    """Return the newest checkpoint with a complete manifest and files of the right sizes; set damaged ones aside.

    Checksums are verified only when the checkpoint is loaded. Only the job that holds the directory's lock may call
    this; others call `newest_whole`. say: called for every checkpoint that is skipped. Raises CheckpointError for an
    unsupported format version.
    """
    return _newest(directory, lambda path, error: quarantine(path, error, say))


def newest_whole(directory: Path) -> Path | None:
    """Return the newest checkpoint that passes the checks of `newest_valid`. Changes nothing on disk."""
    return _newest(directory, lambda path, error: None)


def checkpoint_in(folder: Path) -> Path | None:
    """Return the checkpoint that a folder means: the folder itself, or the newest complete one of a run or of a folder
    of checkpoints; None if there is none."""
    if (folder / MANIFEST).is_file():
        return folder
    return newest_whole(folder / "checkpoints") or newest_whole(folder)


def whole_checkpoint(folder: Path) -> Path:
    """Return `checkpoint_in` of a folder. Raises CheckpointError if it has no checkpoint."""
    checkpoint = checkpoint_in(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"no complete checkpoint in {folder}: a run keeps them in folders such as checkpoints/step-00000100; "
            "a run saves its last step unless checkpoint.at_end is false, and others with --checkpoint.every N"
        )
    return checkpoint


def _newest(directory: Path, skip: Callable[[Path, DamagedCheckpointError], None]) -> Path | None:
    for step, path in reversed(steps(directory).items()):
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
            if manifest.run.step != step:
                raise DamagedCheckpointError(f"{path} contains the checkpoint of step {manifest.run.step}", "step")
        except DamagedCheckpointError as error:
            skip(path, error)
        else:
            return path
    return None


def quarantine(path: Path, error: DamagedCheckpointError, say: Callable[[str], None] = print) -> None:
    """Rename a damaged checkpoint so that no run resumes from it; nothing is deleted.

    Raises CheckpointError if the folder cannot be renamed.
    """
    target = path.with_name(f"{path.name}.bad-{error.reason}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}.bad-{error.reason}-{number}")
        number += 1
    try:
        DISK.rename(path, target)
    except OSError as problem:
        raise CheckpointError(f"{error}; it cannot be renamed to {target.name}: {problem.strerror}") from problem
    say(f"checkpoint {path.name} is damaged and was renamed to {target.name}: {error}")


def remove_leftovers(storage: StorageWriter, directory: Path) -> None:
    """Remove the remains of killed saves and deletions. Only for the job that holds the directory's lock.

    A folder that cannot be removed, for example on NFS while a process reads it, only takes space: the next save tries
    again.
    """
    for path, _ in _matching(directory, _LEFTOVER):
        discard(storage, path)


def discard(storage: StorageWriter, folder: Path) -> None:
    """Remove a folder that may exist, with everything in it, or leave what cannot be removed."""
    with suppress(OSError):
        if folder.exists():
            remove_tree(storage, folder)


def keep_last(directory: Path, count: int, storage: StorageWriter = DISK, *, keep_every: int | None = None) -> None:
    """Delete all but the `count` newest checkpoints; the newest must be durable. Only for the holder of the lock.

    keep_every: checkpoints whose step is a multiple of it are kept permanently. A checkpoint is renamed before it is
    deleted, so that a killed deletion does not leave an incomplete one under its name.
    """
    for step, path in list(steps(directory).items())[:-count]:
        if keep_every is not None and step % keep_every == 0:
            continue
        hidden = path.with_name(f".{path.name}.deleted")
        storage.rename(path, hidden)
        storage.flush_folder(directory)
        remove_tree(storage, hidden)


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not directory.is_dir():
        return []
    folders = filter(Path.is_dir, directory.iterdir())
    return [(path, match) for path in folders if (match := pattern.fullmatch(path.name))]


LOCK = ".lock"


class DirectoryLock:
    """An advisory lock on a directory, which the system releases when the process ends for any reason.

    The file is not removed: otherwise a third job could lock a new file while a second job holds the old one.

    Attributes:
        lock_id: random text that identifies this lock. It is in the lock's file, so that every host can read it.
    """

    def __init__(self, directory: Path, storage: StorageWriter = DISK) -> None:
        """Create the directory durably if it is missing, and lock it. If the lock is refused, no file changes.

        Raises CheckpointError if another job holds the lock (the message names it) or the folder cannot be written.
        """
        path = directory / LOCK
        self.lock_id = uuid.uuid4().hex
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
        holder = json.dumps({"host": os.uname().nodename, "process": os.getpid(), "word": self.lock_id})
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
            os.fsync(self._descriptor)  # so that other hosts can read it
        except OSError as error:
            os.close(self._descriptor)
            raise _unwritable(directory, error) from error

    def keep(self) -> None:
        """Hold the lock until the process ends, because a thread is still writing; `release` then does nothing."""
        self._kept = True

    def release(self) -> None:
        """Release the lock for other jobs."""
        if not self._kept:
            os.close(self._descriptor)


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    reason = explained(error, directory)
    if reason == error.strerror:  # the explanations of other errors contain a remedy
        reason += "; choose a folder in which files can be created"
    return CheckpointError(f"training.directory {directory} cannot be written: {reason}")


def make_durable_folder(directory: Path, storage: StorageWriter = DISK) -> None:
    """Create a folder and its missing parents, so that they survive a power failure."""
    new_folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in new_folders:
        storage.flush_folder(folder.parent)


def read_lock_id(directory: Path) -> str | None:
    """Return the id in the lock file of a directory; None if there is no readable lock file."""
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


def check_new(path: Path) -> None:
    """Raise CheckpointError if a conversion must not create a folder at `path`: it exists, or a checkpoint has it."""
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} already exists; a conversion writes to a new folder: give another path")
    checkpoint = next((each for each in path.parents if (each / MANIFEST).is_file()), None)
    if checkpoint is not None:
        raise CheckpointError(f"{path} is inside the checkpoint {checkpoint}; give a path outside of it")


class FreshFolder:
    """A new folder, written under a hidden name and renamed when it is complete.

    path: its final path. partial: its path until then. Raises CheckpointError if `path` exists: a conversion never
    overwrites anything.
    """

    def __init__(self, path: Path) -> None:
        path = Path(path).absolute()
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        check_new(path)
        with writing(self.partial):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                DISK.make_folder(self.partial)
            except FileExistsError:
                raise CheckpointError(
                    f"{self.partial} exists: another conversion is writing {path}, or one was "
                    "killed; remove that folder unless a conversion is still running"
                ) from None

    def make_folder(self, name: str) -> Path:
        """Create a subfolder, and return its path, which is valid until `finish`."""
        path = self.partial / name
        with writing(path):
            DISK.make_folder(path)
        return path

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file, durably."""
        write_file(DISK, self.partial / name, content.encode() if isinstance(content, str) else content)

    def finish(self) -> None:
        """Rename the folder to its final path; all files in it are durable. Raises CheckpointError."""
        with writing(self.path, verb="complete"):
            DISK.flush_folder(self.partial)
            # If an empty folder has appeared at the path since, it is replaced; any other file or folder is an error.
            DISK.rename(self.partial, self.path)
            DISK.flush_folder(self.path.parent)

    def abandon(self) -> None:
        """Remove everything that was written. If this fails, the next conversion to `path` reports the remains."""
        discard(DISK, self.partial)
