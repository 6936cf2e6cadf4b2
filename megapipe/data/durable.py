"""Writing so that a crash or a power failure leaves the old file or the new one, never a part."""

import os
from pathlib import Path
from typing import BinaryIO


def flush_to_disk(file: BinaryIO) -> None:
    """Write what Python and the kernel have buffered of a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Return once renames in the folder would survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file aside and renames it; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            flush_to_disk(file)
        os.replace(partial, path)
        flush_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
