"""Rules for folders of any origin: names stay inside the folder, and sizes are checked before memory is allocated.

The rules are those of docs/conversion.md; each has a hostile fixture in tests/conversion.
"""

import os
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.config import untrusted

_LENGTH = struct.Struct("<Q")

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file: the format's own bound."""
MAX_SHARDS = 10_000
"""Files that one index may name."""
MAX_TENSORS = 1_000_000
"""Tensors that one index may name."""


def check_safetensors(path: Path) -> int:
    """Bytes of a safetensors file's header. Raises DamagedCheckpointError where it cannot be in such a file."""
    try:
        with path.open("rb") as file:
            prefix, size = file.read(_LENGTH.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; every rank must see all files of a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    length: int = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > MAX_HEADER_BYTES or length + _LENGTH.size > size:
        raise DamagedCheckpointError(
            f"{path} is not a readable safetensors file: it claims a header of {length:,} bytes in a file of "
            f"{size:,}; at most {MAX_HEADER_BYTES:,} are read",
            "unreadable",
        )
    return length


def inside(folder: Path, name: str) -> Path:
    """The file called `name` in a folder.

    Raises CheckpointError for a name with a path in it, and for a link that leads out of the folder.
    """
    if not name or "\0" in name or name != Path(name).name or name in (".", "..") or len(name) > 255:
        raise CheckpointError(
            f"{folder} names the file {reprlib.repr(name)}, which is not in its folder; it is not read"
        )
    path = folder / name
    # What the hub's client downloads are links from snapshots/<revision> to blobs beside it.
    real, home = path.resolve(), folder.resolve()
    store = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if path.is_symlink() and not any(place in real.parents for place in (home, *store)):
        raise CheckpointError(f"{path} is a link that leads out of its folder, to {real}; copy the file itself here")
    return path


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if the file is unreadable or does not contain one."""
    try:
        found = untrusted.read_json(path, CheckpointError)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return found


def check_counts(path: Path, files: int, tensors: int) -> None:
    """Raise CheckpointError for an index that names more than is read."""
    if files > MAX_SHARDS:
        raise CheckpointError(f"{path} names {files:,} files; at most {MAX_SHARDS:,} are read")
    if tensors > MAX_TENSORS:
        raise CheckpointError(f"{path} names {tensors:,} tensors; at most {MAX_TENSORS:,} are read")
