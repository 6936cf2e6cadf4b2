"""Tables whose rows are documents: Parquet and Arrow files, and datasets of the Hugging Face datasets library."""

import os
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from megapipe.data import DataError

if TYPE_CHECKING:
    import pyarrow


_ROWS_AT_ONCE = 1000
_ARROW_FILE_MAGIC = b"ARROW1"
_ARROW_FILE_STREAM_START = 8
_TYPES_IN_WORDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def type_in_words(value: object) -> str:
    """Describe the type of a value from a JSON file or a table, for an error message."""
    return _TYPES_IN_WORDS.get(type(value), f"of type {type(value).__name__}")


@dataclass(frozen=True)
class DocumentRow:
    """One row of a table: a document."""

    path: Path
    number: int
    """Number of the row in the file, from 0."""
    values: tuple[object, ...]
    """One value per field, in the order of the keys."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return one text per key. Raises DataError with file and row."""
        for key, value in zip(keys, self.values, strict=True):
            if isinstance(value, bytes):
                raise DataError(f"{self.place()}: field {key!r} is not UTF-8; convert it or skip with --on-error skip")
            if not isinstance(value, str):
                raise DataError(f"{self.place()}: field {key!r} is {type_in_words(value)}, but must be text")
        return list(map(str, self.values))

    def place(self) -> str:
        return f"{self.path}, row {self.number}"


def parquet_ranges(path: Path, range_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, end, uncompressed bytes, number of the first row) of each row group. Raises DataError for a
    damaged file."""
    import pyarrow.parquet

    with _errors_named(path, "Parquet"):
        metadata = pyarrow.parquet.read_metadata(path)
        first_row = 0
        for group in range(metadata.num_row_groups):
            yield group, group + 1, metadata.row_group(group).total_byte_size, first_row
            first_row += metadata.row_group(group).num_rows


def parquet_batches(path: Path, begin: int, end: int, keys: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the row groups [begin, end) of a Parquet file in batches, with only the columns `keys`.

    Raises DataError for a file that cannot be read or has no such column.
    """
    import pyarrow.parquet

    with _errors_named(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        check_columns(path, file.schema_arrow.names, keys)
        # Use one thread, because several workers run in parallel.
        yield from file.iter_batches(_ROWS_AT_ONCE, range(begin, end), columns=list(keys), use_threads=False)


def arrow_ranges(path: Path, range_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first byte, end, bytes, number of the first row) of each record batch of an Arrow file or stream.

    Raises DataError for a damaged file, and for dictionary-encoded columns, whose batches need an earlier message.
    """
    import pyarrow

    first_row = 0
    with _errors_named(path, "Arrow"), _mapped(path) as source:
        schema = pyarrow.ipc.read_schema(source)
        while (begin := source.tell()) < source.size():
            try:
                message = pyarrow.ipc.read_message(source)
            except EOFError:  # the marker at the end of the batches
                return
            if message.type == "dictionary":
                raise DataError(
                    f"{path} has dictionary-encoded columns, which cannot be read; write it "
                    "as Parquet, or with plain strings"
                )
            batch = pyarrow.ipc.read_record_batch(message, schema)
            yield begin, source.tell(), source.tell() - begin, first_row
            first_row += batch.num_rows


def arrow_batches(path: Path, begin: int, end: int) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the record batches in the bytes [begin, end) of an Arrow file or stream. Raises DataError for a file that
    cannot be read."""
    import pyarrow

    with _errors_named(path, "Arrow"), _mapped(path) as source:
        schema = pyarrow.ipc.read_schema(source)
        source.seek(begin)
        while source.tell() < end:
            yield pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), schema)


def rows_of(
    path: Path, first_row: int, batches: Iterator["pyarrow.RecordBatch"], keys: Sequence[str]
) -> Iterator[DocumentRow]:
    """Yield a document for each row of the batches, with the values of the columns `keys`.

    first_row: number of the batches' first row in the file, for messages. Raises DataError for a missing column.
    """
    for batch in batches:
        check_columns(path, batch.schema.names, keys)
        columns = [_values(batch.column(key)) for key in keys]
        for number, values in enumerate(zip(*columns, strict=True)):
            yield DocumentRow(path, first_row + number, values)
        first_row += batch.num_rows


def check_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    """Raise DataError for the first of `keys` that is not among the columns `names`."""
    if missing := [key for key in keys if key not in names]:
        raise DataError(f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names))}; change --json-keys")


def _values(column: "pyarrow.Array") -> list[object]:
    """Return Python values. Text that is not UTF-8 becomes bytes, so that all other values can be used."""
    import pyarrow

    try:
        values: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
        return [_decoded(value) for value in values]
    return values


def _decoded(value: object) -> object:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


@contextmanager
def _mapped(path: Path) -> Iterator["pyarrow.MemoryMappedFile"]:
    """Map a file and seek to its schema. An Arrow file is an Arrow stream with a header and a footer."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        source.seek(_ARROW_FILE_STREAM_START if is_file else 0)
        yield source


@contextmanager
def _errors_named(path: Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, EOFError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as {kind} ({str(error).splitlines()[0]}); it is damaged "
            "or cut off: copy it again, or leave it out with --exclude"
        ) from error


DATASET_PREFIX = "dataset:"
DEFAULT_SPLIT = "train"


class DatasetName(NamedTuple):
    """Parts of `dataset:NAME[:CONFIGURATION][@SPLIT][?REVISION][&stream]`; the last two come from options.

    revision: a branch, tag or commit on the hub. stream: whether to read its files over the network, without a copy.
    """

    name: str
    configuration: str = ""
    split: str = ""
    revision: str = ""
    stream: bool = False

    @classmethod
    def of(cls, spec: str) -> "DatasetName":
        """Split a specification into its parts. The path of an existing folder is a name without other parts."""
        rest = spec.removeprefix(DATASET_PREFIX)
        if Path(rest).exists():  # a folder, with any characters in its name
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

    A streamed dataset is pinned to the current commit of its revision, so that all workers read the same data.

    Raises DataError for a folder, which has no revision and cannot be streamed.
    """
    if not (revision or stream):
        return spec
    dataset = DatasetName.of(spec)
    if Path(dataset.name).exists():
        raise DataError(
            f"{dataset.name} is a folder, but --dataset-revision and --dataset-streaming are "
            "for datasets on the hub: remove them"
        )
    dataset = dataset._replace(revision=revision or "", stream=stream)
    return str(dataset._replace(revision=_commit(dataset)) if stream else dataset)


def _commit(dataset: DatasetName) -> str:
    """Return the commit of a dataset on the hub."""
    try:
        import huggingface_hub

        commit = huggingface_hub.HfApi().dataset_info(dataset.name, revision=dataset.revision or None).sha
    except Exception as error:  # the library raises various errors of its network library
        raise DataError(
            f"{dataset} cannot be opened on {_host()}; check name and revision ({_first_line(error)})"
        ) from error
    return str(commit)


def is_saved_dataset(folder: str) -> bool:
    """Return whether the folder was written by `save_to_disk` of the datasets library."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def dataset_bytes(spec: str) -> int:
    """Return the bytes of the rows in memory, about the size of their texts; 0 if the size of a stream is unknown."""
    if DatasetName.of(spec).stream:
        return int(_load_dataset(spec).info.dataset_size or 0)
    return _open_as_arrow(spec).data.nbytes


def dataset_ranges(path: Path, range_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, end, bytes, first row) of ranges of about `range_bytes`. For a stream, yield numbers of files
    instead of rows. path: name of the dataset."""
    spec = str(path)
    if DatasetName.of(spec).stream:
        # With this size each file becomes one part, because a file can only be streamed from its beginning.
        yield from ((number, number + 1, range_bytes, number) for number in range(_load_dataset(spec).num_shards))
        return
    dataset = _open_as_arrow(spec)
    row_bytes = max(1, dataset.data.nbytes // max(1, len(dataset)))
    step = max(1, range_bytes // row_bytes)
    for begin in range(0, len(dataset), step):
        end = min(begin + step, len(dataset))
        yield begin, end, (end - begin) * row_bytes, begin


Ranges = Callable[[Path, int], Iterator[tuple[int, int, int, int]]]
TABLE_RANGES: dict[str, Ranges] = {"parquet": parquet_ranges, "arrow": arrow_ranges, "dataset": dataset_ranges}
"""For each format of tables, the function that cuts a table into ranges: (begin, end, bytes, first row)."""


def dataset_batches(spec: str, begin: int, end: int) -> Iterator["pyarrow.Table"]:
    """Yield the rows [begin, end) of a dataset in batches. For a streamed dataset, yield the files [begin, end)."""
    dataset = _open_as_arrow(spec)
    if DatasetName.of(spec).stream:
        for number in range(begin, end):
            yield from dataset.shard(dataset.num_shards, number).iter(_ROWS_AT_ONCE)
        return
    for start in range(begin, end, _ROWS_AT_ONCE):
        yield dataset[start : min(start + _ROWS_AT_ONCE, end)]


def dataset_fingerprint(spec: str) -> str:
    """Return an identifier of a dataset's state: its commit if it is streamed. It is not a checksum of the rows."""
    dataset_name = DatasetName.of(spec)
    if dataset_name.stream:
        return f"commit:{dataset_name.revision}"
    return f"datasets:{_load_dataset(spec)._fingerprint}"


def _open_as_arrow(spec: str) -> Any:
    """Return the dataset, with rows as Arrow tables."""
    return _load_dataset(spec).with_format("arrow")


@lru_cache(maxsize=4)
def _load_dataset(spec: str) -> Any:
    """Open the dataset. spec: see DatasetName; NAME may be a folder.

    Raises DataError if the library is missing, the dataset cannot be opened, or it does not have the split. Without a
    name, the split is DEFAULT_SPLIT or the only split.
    """
    name, configuration, split, revision, stream = DatasetName.of(spec)
    unreachable = None if Path(name).exists() else _why_unreachable()
    if unreachable is not None:
        # The library reads this at import, and then uses its cache immediately instead of after 30 s of attempts.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{spec} needs the datasets library: pip install datasets") from error
    try:
        if is_saved_dataset(name):
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(
                name, configuration or None, split=split or None, revision=revision or None, streaming=stream
            )
    except Exception as error:
        # The library raises various errors of file formats and networks.
        if unreachable is not None or isinstance(error, ConnectionError):
            raise DataError(
                f"{spec} is not in the cache of the datasets library, and {_host()} cannot be "
                f"reached ({unreachable or _first_line(error)}): load it once with a network, "
                f"or name a folder with its files, {DATASET_PREFIX}FOLDER"
            ) from error
        checked = "folder" if Path(name).is_dir() else "name and revision"
        raise DataError(f"{spec} cannot be opened as a dataset; check the {checked} ({_first_line(error)})") from error
    if isinstance(dataset, dict):
        split = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in dataset or len(dataset) != 1 else next(iter(dataset)))
        if split not in dataset:
            raise DataError(f"{spec} has the splits {', '.join(dataset)}: name one, {DATASET_PREFIX}{name}@SPLIT")
        dataset = dataset[split]
    elif split and str(dataset.split or split) != split:
        raise DataError(f"{spec}: that folder contains only the split {dataset.split}")
    return dataset


def _host() -> str:
    """Return the host of datasets that are opened by name."""
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""


def _why_unreachable() -> str | None:
    """Return the reason why the host of datasets cannot be reached; None if it may be reachable, e.g. by a proxy."""
    if urllib.request.getproxies():
        return None
    try:
        socket.getaddrinfo(_host(), 443)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
