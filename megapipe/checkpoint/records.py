"""How ranks that write in the background report a durable file to rank 0: by a file in the checkpoint's folder.

Collectives belong to the thread that trains; those of another thread would meet them in no fixed order. The file
`rank-00001.json` means that the rank's tensor file is durable, and describes it as a manifest of this file only. It
gets its name when it is complete. Failures are not reported here, since a disk that failed may accept no file at all:
see `background`.
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


def report_written(storage: StorageWriter, partial: Path, rank: int, manifest: Manifest) -> None:
    """Report that this rank's share is durable. manifest: of this share alone. Raises CheckpointError.

    The rename is the last operation: after it, rank 0 may rename the whole folder.
    """
    path = _record(partial, rank)
    incomplete = path.with_name(f"{path.name}.begun")
    try:
        write_file(storage, incomplete, [memoryview(encoded(manifest))])
        storage.rename(incomplete, path)
    except OSError as error:
        raise CheckpointError(f"cannot write into {partial}: {explained(error, partial.parent)}") from error


def await_written(
    storage: StorageWriter, partial: Path, size: int, patience: float, abandoned: threading.Event
) -> list[Manifest]:
    """Return what every rank but 0 has written, in rank order, and remove their records.

    Args:
        size: ranks of the world.
        patience: seconds to wait while nothing grows in the folder.
        abandoned: set when the save is given up, or has failed on another rank.

    Raises:
        CheckpointError: nothing grew for `patience` seconds, or `abandoned` was set.
    """
    found: dict[int, Manifest] = {}
    pause, grown, since = _FIRST_PAUSE, -1, time.monotonic()
    while True:
        sizes = _sizes(partial)
        for rank in set(range(1, size)) - found.keys():
            if _record(partial, rank).name in sizes:
                found[rank] = read_manifest_file(_record(partial, rank))
        if len(found) == size - 1:
            break
        now, total = time.monotonic(), len(sizes) + sum(sizes.values())
        if total != grown:
            grown, since = total, now
        if now - since > patience:
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
            raise CheckpointError(
                f"rank {missing} wrote nothing into {partial} for {patience:g} s; every rank must see the same folder "
                "there; if its disk was only slow, raise parallel.timeout_seconds"
            )
        if abandoned.wait(pause):
            raise CheckpointError(f"{partial} was given up")
        pause = min(2 * pause, _LONGEST_PAUSE)
    for rank in range(1, size):
        storage.remove(_record(partial, rank))
    return [found[rank] for rank in range(1, size)]


def _sizes(partial: Path) -> dict[str, int]:
    """Return file -> bytes, which grow as long as a rank writes."""
    found = {}
    for entry in os.scandir(partial):
        try:
            found[entry.name] = entry.stat().st_size
        except FileNotFoundError:
            continue
    return found


def _record(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"
