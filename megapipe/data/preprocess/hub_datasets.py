"""Datasets of the Hugging Face `datasets` library: by name, by folder, or saved to disk."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megapipe.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow

DATASET_PREFIX = "dataset:"
DEFAULT_SPLIT = "train"
_ROWS_AT_ONCE = 1000


def is_saved_dataset(folder: str) -> bool:
    """Whether `save_to_disk` of that library wrote the folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def dataset_bytes(spec: str) -> int:
    """Bytes that the rows take in memory, about what their texts take."""
    size: int = _open(spec).data.nbytes
    return size


def dataset_ranges(spec: str, range_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first row, one past the last, bytes) of ranges of about `range_bytes`."""
    dataset = _open(spec)
    row_bytes = max(1, dataset.data.nbytes // max(1, len(dataset)))
    step = max(1, range_bytes // row_bytes)
    for begin in range(0, len(dataset), step):
        end = min(begin + step, len(dataset))
        yield begin, end, (end - begin) * row_bytes


def dataset_batches(spec: str, begin: int, end: int) -> Iterator["pyarrow.Table"]:
    dataset = _open(spec)
    for start in range(begin, end, _ROWS_AT_ONCE):
        yield dataset[start : min(start + _ROWS_AT_ONCE, end)]


def dataset_fingerprint(spec: str) -> str:
    """What the datasets library tells one state of a dataset from another by; no checksum of its rows."""
    return f"datasets:{_opened(spec)._fingerprint}"


def _open(spec: str) -> Any:
    """The dataset, rows as Arrow tables."""
    return _opened(spec).with_format("arrow")


@lru_cache(maxsize=4)
def _opened(spec: str) -> Any:
    """The dataset. `spec` is `dataset:NAME[:CONFIGURATION][@SPLIT]`; NAME may be a folder.

    Raises DataError where the library is missing, the dataset cannot be opened, or it has several splits and none is
    named.
    """
    name, _, split = spec.removeprefix(DATASET_PREFIX).partition("@")
    name, _, configuration = name.partition(":")
    unreachable = None if Path(name).exists() else _why_unreachable()
    if unreachable is not None:
        # Read at import: the library then looks into its cache at once, and not after half a minute of tries.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{spec} needs the datasets library: pip install datasets") from error
    try:
        if is_saved_dataset(name):
            opened = datasets.load_from_disk(name)
        else:
            opened = datasets.load_dataset(name, configuration or None, split=split or None)
    except Exception as error:  # the library raises what its file formats and its network raise
        if unreachable is not None or isinstance(error, ConnectionError):
            raise DataError(
                f"{spec} is not in the cache of the datasets library, and {_host()} cannot be reached "
                f"({unreachable or _first_line(error)}): load it once where there is a network, or name a folder "
                f"of its files, {DATASET_PREFIX}FOLDER"
            ) from error
        what = "folder" if Path(name).is_dir() else "name"
        raise DataError(f"{spec} cannot be opened as a dataset; check the {what} ({_first_line(error)})") from error
    if isinstance(opened, dict):
        split = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in opened or len(opened) != 1 else next(iter(opened)))
        if split not in opened:
            raise DataError(f"{spec} has the splits {', '.join(opened)}: name one, {DATASET_PREFIX}{name}@SPLIT")
        opened = opened[split]
    elif split and str(opened.split or split) != split:
        raise DataError(f"{spec}: that folder holds the split {opened.split} alone")
    return opened


def _host() -> str:
    """Where datasets are looked for by name."""
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""


def _why_unreachable() -> str | None:
    """Why there is no way to the host of datasets; None where there may be one, through a proxy say."""
    if urllib.request.getproxies():
        return None
    try:
        socket.getaddrinfo(_host(), 443)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
