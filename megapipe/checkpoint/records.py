"""How ranks that write in the background tell rank 0 of it: by files in the checkpoint's folder, not by collectives.

Collectives belong to the thread that trains, and would meet its own in no fixed order. `rank-00001.json` says that the
rank's file is durable and what is in it, as a manifest of this file alone; `rank-00001.failed` holds what went wrong
instead. Both get their name when they are whole.
"""

import os
import threading
import time
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import Manifest
from megapipe.checkpoint.manifest_file import encoded, read_manifest_file
from megapipe.checkpoint.storage import StorageWriter, explained, write_file

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.5
"""Seconds between two looks at the folder."""


def tell_written(storage: StorageWriter, partial: Path, rank: int, manifest: Manifest) -> None:
    """Say that this rank's share is durable. manifest: of this share alone. Raises CheckpointError."""
    try:
        _tell(storage, _record(partial, rank), encoded(manifest))
    except OSError as error:
        raise CheckpointError(f"cannot write into {partial}: {explained(error, partial.parent)}") from error


def tell_failed(storage: StorageWriter, partial: Path, rank: int, error: BaseException) -> None:
    """Say that this rank could not write its share. Where even that fails, rank 0's patience ends the save."""
    told = f"{error} (rank {rank}, on {os.uname().nodename})"
    try:
        _tell(storage, _failure(partial, rank), told.encode())
    except (CheckpointError, OSError):
        return


def _tell(storage: StorageWriter, path: Path, content: bytes) -> None:
    """Nothing of it is done after the rename: by then rank 0 may give the whole folder its other name."""
    begun = path.with_name(f"{path.name}.begun")
    write_file(storage, begun, [memoryview(content)])
    storage.rename(begun, path)


def await_written(
    storage: StorageWriter, partial: Path, size: int, patience: float, abandoned: threading.Event
) -> list[Manifest]:
    """Return what every rank but 0 has written, in rank order, and remove their records.

    Args:
        size: ranks of the world.
        patience: seconds to wait while nothing grows in the folder.
        abandoned: set by who gives the save up.

    Raises:
        CheckpointError: a rank failed, nothing grew for `patience` seconds, or the save was given up.
    """
    found: dict[int, Manifest] = {}
    pause, grown, since = _FIRST_PAUSE, -1, time.monotonic()
    while True:
        sizes = _sizes(partial)
        for rank in set(range(1, size)) - found.keys():
            if {_record(partial, rank).name, _failure(partial, rank).name} & sizes.keys():
                found[rank] = _written(partial, rank)
        if len(found) == size - 1:
            break
        now, total = time.monotonic(), len(sizes) + sum(sizes.values())
        if total != grown:
            grown, since = total, now
        if now - since > patience:
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
            raise CheckpointError(
                f"rank {missing} wrote nothing into {partial} for {patience:g} s; every rank must see the same folder "
                "there, and parallel.timeout_seconds must be longer than its disk stands still"
            )
        if abandoned.wait(pause):
            raise CheckpointError(f"{partial} was given up")
        pause = min(2 * pause, _LONGEST_PAUSE)
    for rank in range(1, size):
        storage.remove(_record(partial, rank))
    return [found[rank] for rank in range(1, size)]


def _written(partial: Path, rank: int) -> Manifest:
    """What a rank says that it has written. Raises CheckpointError with what it says that went wrong."""
    failure, record = _failure(partial, rank), _record(partial, rank)
    if failure.exists():
        raise CheckpointError(failure.read_text(encoding="utf-8"))
    return read_manifest_file(record)


def _sizes(partial: Path) -> dict[str, int]:
    """File -> bytes; they grow as long as somebody writes."""
    found = {}
    for entry in os.scandir(partial):
        try:
            found[entry.name] = entry.stat().st_size
        except FileNotFoundError:
            continue
    return found


def _record(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


def _failure(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.failed"
