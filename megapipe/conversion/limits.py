"""What a folder from anywhere may contain: names that stay inside it, and sizes that are seen before memory is taken.

The rules are those of docs/conversion.md; each has a hostile fixture in tests/conversion.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file: the format's own bound."""
MAX_JSON_BYTES = 1 << 27
"""Of config.json and an index."""
MAX_JSON_DEPTH = 64
MAX_SHARDS = 10_000
"""Files that one index may name."""
MAX_TENSORS = 1_000_000
"""Tensors that one index may name."""


def check_header(path: Path, length: int, size: int) -> None:
    """Raise DamagedCheckpointError where a safetensors header of `length` bytes cannot be in a file of `size`."""
    if length > MAX_HEADER_BYTES or length + 8 > size:
        raise DamagedCheckpointError(
            f"{path} is not a readable safetensors file: it tells of a header of {length:,} bytes in a file of "
            f"{size:,}; at most {MAX_HEADER_BYTES:,} are read",
            "unreadable",
        )


def inside(folder: Path, name: str) -> Path:
    """The file called `name` in a folder.

    Raises CheckpointError for a name with a path in it, and for a link that leads out of the folder.
    """
    if not name or "\0" in name or name != Path(name).name or name in (".", ".."):
        raise CheckpointError(f"{folder} names the file {name!r}, which is not in its folder; it is not read")
    path = folder / name
    # Downloaded folders are often links into a store beside them; that store is theirs, the rest of the disk is not.
    real, home = path.resolve(), folder.resolve()
    if path.is_symlink() and home not in real.parents and home.parent.parent not in real.parents:
        raise CheckpointError(f"{path} is a link that leads out of its folder, to {real}; copy the file itself here")
    return path


def read_json(path: Path) -> Mapping[str, Any]:
    """The object that a JSON file holds.

    Raises CheckpointError where it is too large or too deep, has a key twice, or is no object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    depth = _depth(text)
    if depth > MAX_JSON_DEPTH:
        raise CheckpointError(f"{path} nests {depth} levels deep; at most {MAX_JSON_DEPTH} are read")
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def check_counts(path: Path, files: int, tensors: int) -> None:
    """Raise CheckpointError for an index that names more than is read."""
    if files > MAX_SHARDS:
        raise CheckpointError(f"{path} names {files:,} files; at most {MAX_SHARDS:,} are read")
    if tensors > MAX_TENSORS:
        raise CheckpointError(f"{path} names {tensors:,} tensors; at most {MAX_TENSORS:,} are read")


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(f"{path} has the key {key!r} twice; which of the two holds cannot be told")
        found[key] = value
    return found


def _depth(text: str) -> int:
    """Brackets that are open at once, strings left aside."""
    deepest = depth = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
