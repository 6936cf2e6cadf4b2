"""Datasets of the Hugging Face `datasets` library: by name, by folder, or saved to disk."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from megapipe.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow

DATASET_PREFIX = "dataset:"
DEFAULT_SPLIT = "train"
_ROWS_AT_ONCE = 1000


class DatasetName(NamedTuple):
    """Parts of `dataset:NAME[:CONFIGURATION][@SPLIT][?REVISION][&stream]`; the last two come from options.

    revision: a branch, tag or commit of the hub. stream: read its files over the network, without keeping them.
    """

    name: str
    configuration: str = ""
    split: str = ""
    revision: str = ""
    stream: bool = False

    @classmethod
    def of(cls, spec: str) -> "DatasetName":
        """Split a specification into its parts. The path of a folder that exists is a name as a whole."""
        rest = spec.removeprefix(DATASET_PREFIX)
        if Path(rest).exists():  # a folder, whatever characters its name has
            return cls(rest)
        stream = rest.endswith(_STREAM)
        rest, _, revision = rest.removesuffix(_STREAM).partition("?")
        rest, _, split = rest.partition("@")
        name, _, configuration = rest.partition(":")
        return cls(name, configuration, split, revision, stream)

    def __str__(self) -> str:
        parts = [f":{self.configuration}" if self.configuration else "", f"@{self.split}" if self.split else ""]
        parts += [f"?{self.revision}" if self.revision else "", _STREAM if self.stream else ""]
        return DATASET_PREFIX + self.name + "".join(parts)


_STREAM = "&stream"


def with_options(spec: str, revision: str | None, stream: bool) -> str:
    """Return the name of a dataset with --dataset-revision and --dataset-streaming.

    A dataset that is streamed is pinned to the current commit of its revision, so that all workers read the same.

    Raises DataError for a folder, which has neither.
    """
    if not (revision or stream):
        return spec
    named = DatasetName.of(spec)
    if Path(named.name).exists():
        raise DataError(
            f"{named.name} is a folder, but --dataset-revision and --dataset-streaming are for datasets on the hub: "
            "remove them"
        )
    named = named._replace(revision=revision or "", stream=stream)
    return str(named._replace(revision=_commit(named)) if stream else named)


def _commit(named: DatasetName) -> str:
    """Return the commit of a dataset on the hub."""
    try:
        import huggingface_hub

        commit = huggingface_hub.HfApi().dataset_info(named.name, revision=named.revision or None).sha
    except Exception as error:  # the library raises what its network raises
        raise DataError(
            f"{named} cannot be opened on {_host()}; check name and revision ({_first_line(error)})"
        ) from error
    return str(commit)


def is_saved_dataset(folder: str) -> bool:
    """Whether `save_to_disk` of that library wrote the folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def dataset_bytes(spec: str) -> int:
    """Return the bytes of the rows in memory, about those of their texts; 0 if they are not known before reading."""
    if DatasetName.of(spec).stream:
        return int(_opened(spec).info.dataset_size or 0)
    size: int = _open(spec).data.nbytes
    return size


def dataset_ranges(spec: str, range_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, one past the last, bytes) of ranges of about `range_bytes`; for a stream, files by number."""
    if DatasetName.of(spec).stream:
        # With this size each file becomes one part, since a file can only be streamed from its beginning.
        yield from ((number, number + 1, range_bytes) for number in range(_opened(spec).num_shards))
        return
    dataset = _open(spec)
    row_bytes = max(1, dataset.data.nbytes // max(1, len(dataset)))
    step = max(1, range_bytes // row_bytes)
    for begin in range(0, len(dataset), step):
        end = min(begin + step, len(dataset))
        yield begin, end, (end - begin) * row_bytes


def dataset_batches(spec: str, begin: int, end: int) -> Iterator["pyarrow.Table"]:
    """Yield the rows [begin, end) of a dataset, or its shards [begin, end) if it is streamed, some rows at a time."""
    dataset = _open(spec)
    if DatasetName.of(spec).stream:
        for number in range(begin, end):
            yield from dataset.shard(dataset.num_shards, number).iter(_ROWS_AT_ONCE)
        return
    for start in range(begin, end, _ROWS_AT_ONCE):
        yield dataset[start : min(start + _ROWS_AT_ONCE, end)]


def dataset_fingerprint(spec: str) -> str:
    """Return an identifier of a dataset's state: its commit if it is streamed. It is not a checksum of its rows."""
    named = DatasetName.of(spec)
    if named.stream:
        return f"commit:{named.revision}"
    return f"datasets:{_opened(spec)._fingerprint}"


def _open(spec: str) -> Any:
    """The dataset, rows as Arrow tables."""
    return _opened(spec).with_format("arrow")


@lru_cache(maxsize=4)
def _opened(spec: str) -> Any:
    """The dataset. `spec` is as in DatasetName; NAME may be a folder.

    Raises DataError where the library is missing, the dataset cannot be opened, or it has several splits and none is
    named.
    """
    name, configuration, split, revision, stream = DatasetName.of(spec)
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
            opened = datasets.load_dataset(
                name, configuration or None, split=split or None, revision=revision or None, streaming=stream
            )
    except Exception as error:  # the library raises what its file formats and its network raise
        if unreachable is not None or isinstance(error, ConnectionError):
            raise DataError(
                f"{spec} is not in the cache of the datasets library, and {_host()} cannot be reached "
                f"({unreachable or _first_line(error)}): load it once where there is a network, or name a folder "
                f"of its files, {DATASET_PREFIX}FOLDER"
            ) from error
        what = "folder" if Path(name).is_dir() else "name and revision"
        raise DataError(f"{spec} cannot be opened as a dataset; check the {what} ({_first_line(error)})") from error
    if isinstance(opened, dict):
        split = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in opened or len(opened) != 1 else next(iter(opened)))
        if split not in opened:
            raise DataError(f"{spec} has the splits {', '.join(opened)}: name one, {DATASET_PREFIX}{name}@SPLIT")
        opened = opened[split]
    elif split and str(opened.split or split) != split:
        raise DataError(f"{spec}: that folder contains only the split {opened.split}")
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
