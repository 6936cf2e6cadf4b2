"""A run's folder of checkpoints: one folder per step, written under another name and renamed once it is complete.

step-00000010/                complete, or damaged afterwards
step-00000010.bad-checksum/   was damaged when it was loaded, and was set aside
.step-00000010.partial/       being written, or left over from a save that was killed
.step-00000010.deleted/       being deleted
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.manifest_file import check_files, read_manifest
from megapipe.checkpoint.storage import DISK, StorageWriter, remove_tree

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|deleted)")
_SET_ASIDE = re.compile(r"step-\d{8,}\.bad-.*")


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written before it is complete."""
    return directory / f".step-{step:08d}.partial"


def steps(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a directory by step, ascending; empty when there is no such directory."""
    return dict(sorted((int(match[1]), path) for path, match in _matching(directory, _STEP)))


def set_aside(directory: Path) -> list[Path]:
    """Return the checkpoints that were damaged when they were loaded."""
    return sorted(path for path, _ in _matching(directory, _SET_ASIDE))


def newest_valid(directory: Path, say: Callable[[str], None] = print) -> Path | None:
    """Return the newest checkpoint with a complete manifest and files of the right sizes; set damaged ones aside.

    Checksums are not verified here but in loading. For the owner of the directory; a reader calls `newest_whole`.
    say: called for every checkpoint that is skipped. Raises CheckpointError for one of another format version.
    """
    return _newest(directory, lambda path, error: quarantine(path, error, say))


def newest_whole(directory: Path) -> Path | None:
    """Return the newest checkpoint that passes the checks of `newest_valid`; nothing is changed on disk."""
    return _newest(directory, lambda path, error: None)


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

    Raises CheckpointError when the folder cannot be renamed.
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
    """Remove what killed saves and deletions left over. For the owner of the directory alone.

    A folder that cannot be removed, for example on NFS while a process reads it, only costs space: the next save tries
    again.
    """
    for path, _ in _matching(directory, _LEFTOVER):
        with suppress(OSError):
            remove_tree(storage, path)


def keep_last(directory: Path, count: int, storage: StorageWriter = DISK, *, keep_every: int | None = None) -> None:
    """Delete all but the `count` newest checkpoints; the newest is durable already. For the owner of the directory.

    keep_every: checkpoints whose step is a multiple of it are kept permanently. A checkpoint is renamed first, so that
    a deletion that is killed leaves no incomplete one under its name.
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
    found = [(path, pattern.fullmatch(path.name)) for path in directory.iterdir() if path.is_dir()]
    return [(path, match) for path, match in found if match is not None]
