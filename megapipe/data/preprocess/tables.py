"""Rows of Parquet and Arrow files, by row group and record batch, columns that are not asked for left unread."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.data.errors import DataError

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
    """Return the type of a value from a JSON file or a table, for an error message."""
    return _TYPES_IN_WORDS.get(type(value), f"of type {type(value).__name__}")


@dataclass(frozen=True)
class DocumentRow:
    """One row of a table: a document."""

    path: Path
    number: int
    """In the file, from 0."""
    values: tuple[object, ...]
    """One per field, in the order of the keys."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """One text per key. Raises DataError that names file and row."""
        for key, value in zip(keys, self.values, strict=True):
            if isinstance(value, bytes):
                raise DataError(
                    f"{self.place()}: field {key!r} is not UTF-8; convert it, or skip with --on-error skip"
                )
            if not isinstance(value, str):
                raise DataError(f"{self.place()}: field {key!r} is {type_in_words(value)}, but must be text")
        return list(map(str, self.values))

    def place(self) -> str:
        return f"{self.path}, row {self.number}"


def parquet_ranges(path: Path) -> Iterator[tuple[int, int]]:
    """(bytes before compression, number of the first row) of each row group. Raises DataError for a damaged file."""
    import pyarrow.parquet

    with _errors_named(path, "Parquet"):
        metadata = pyarrow.parquet.read_metadata(path)
        first_row = 0
        for group in range(metadata.num_row_groups):
            yield metadata.row_group(group).total_byte_size, first_row
            first_row += metadata.row_group(group).num_rows


def parquet_batches(path: Path, begin: int, end: int, keys: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the row groups [begin, end) of a Parquet file in batches, with the columns `keys` alone.

    Raises DataError for a file that cannot be read or has no such column.
    """
    import pyarrow.parquet

    with _errors_named(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        check_columns(path, file.schema_arrow.names, keys)
        # One thread: the workers are the parallelism.
        yield from file.iter_batches(_ROWS_AT_ONCE, range(begin, end), columns=list(keys), use_threads=False)


def arrow_ranges(path: Path) -> Iterator[tuple[int, int, int]]:
    """(first byte, one past the last, number of the first row) of each record batch of an Arrow file or stream.

    Raises DataError for a damaged file and for dictionaries, without which a batch in the middle cannot be read.
    """
    import pyarrow

    first_row = 0
    with _errors_named(path, "Arrow"), _mapped(path) as source:
        schema = pyarrow.ipc.read_schema(source)
        while (begin := source.tell()) < source.size():
            try:
                message = pyarrow.ipc.read_message(source)
            except EOFError:  # the mark at the end of the batches
                return
            if message.type == "dictionary":
                raise DataError(
                    f"{path} has dictionary-encoded columns, which cannot be read; write it as Parquet, or with plain "
                    "strings"
                )
            batch = pyarrow.ipc.read_record_batch(message, schema)
            yield begin, source.tell(), first_row
            first_row += batch.num_rows


def arrow_batches(path: Path, begin: int, end: int, keys: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the record batches in the bytes [begin, end) of an Arrow file or stream.

    Raises DataError for a file that cannot be read or has no column of `keys`.
    """
    import pyarrow

    with _errors_named(path, "Arrow"), _mapped(path) as source:
        schema = pyarrow.ipc.read_schema(source)
        check_columns(path, schema.names, keys)
        source.seek(begin)
        while source.tell() < end:
            yield pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), schema)


def rows_of(
    path: Path, first_row: int, batches: Iterator["pyarrow.RecordBatch"], keys: Sequence[str]
) -> Iterator[DocumentRow]:
    """Yield a document for each row of the batches, with the values of the columns `keys`.

    first_row: number of the batches' first row in the file, for messages. Raises DataError for a column that is not
    there.
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
        raise DataError(
            f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names))}; choose columns with --json-keys"
        )


def _values(column: "pyarrow.Array") -> list[object]:
    """Python values; a text that is not UTF-8 as its bytes, so that it does not hide the others."""
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
    """The file, mapped, at its schema. A file differs from a stream by a frame around the same messages."""
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
            f"{path} cannot be read as {kind} ({str(error).splitlines()[0]}); it is damaged or cut off: copy it "
            "again, or leave it out with --exclude"
        ) from error
