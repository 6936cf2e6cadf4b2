"""Writes of whole files that survive a power failure."""

import os
from pathlib import Path
from typing import BinaryIO


def flush_to_disk(file: BinaryIO) -> None:
    """Write a file's data from the buffers of Python and the kernel to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until renames in the folder would survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it; create its folder if needed."""
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
