"""Names and readers of the files in which `run_folder.RunFolder` records the starts of a run."""

from pathlib import Path
from typing import Any

from megapipe.config.untrusted import decode_json

CONFIG = "config.yaml"
RUN = "run.json"

RUNNING = "running, or killed"
"""Status of a start that has not recorded its end."""


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a run.json; each has an `id`. Raises OSError, and ValueError if it has other content."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    value = decode_json(path.read_bytes(), str(path), ValueError)
    starts = value.get("starts") if isinstance(value, dict) else None
    if not isinstance(starts, list) or not all(
        isinstance(each, dict) and isinstance(each.get("id"), str) for each in starts
    ):
        raise ValueError(f"{path} is not a list of the starts of a run")
    return starts
