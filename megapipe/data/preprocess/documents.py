"""Documents of a piece of input: raw bytes first, so that one broken document does not end the reading."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from megapipe.data.errors import DataError
from megapipe.data.preprocess.hub_datasets import dataset_batches
from megapipe.data.preprocess.parts import FileRange
from megapipe.data.preprocess.tables import arrow_batches, parquet_batches, rows_of, type_in_words

TEXT_KEY = "text"
"""The field that the content of a text file counts as."""


class Document(Protocol):
    """A document of any format, before its text is looked at."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """One text per key. Raises DataError that names file and line or row."""

    def place(self) -> str:
        """File, and line or row where there are any."""


@dataclass(frozen=True)
class RawDocument:
    """A line of a file of JSON lines, or a whole text file."""

    path: Path
    offset: int | None
    """First byte of the line in a file of JSON lines that can be read from any byte."""
    content: bytes
    line: int | None = None
    """Number of the line, where it is known."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """One text per key. Raises DataError that names file and line."""
        if self.offset is None and self.line is None:
            if list(keys) != [TEXT_KEY]:
                raise DataError(
                    f"{self.path} is read as plain text and has the one field {TEXT_KEY!r}, not {', '.join(keys)}; "
                    "JSON lines need a name that ends in .jsonl"
                )
            return [self._decode()]
        try:
            record = json.loads(self._decode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.place()}: not JSON ({error}); repair the line or skip it with --on-error skip"
            ) from error
        return [self._field(record, key) for key in keys]

    def place(self) -> str:
        """File, and line number where there are lines. Counts the lines before it: for messages only."""
        if self.line is not None:
            return f"{self.path}, line {self.line}"
        if self.offset is None:
            return str(self.path)
        return f"{self.path}, line {_line_number(self.path, self.offset)}"

    def _decode(self) -> str:
        try:
            return self.content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.place()}: not UTF-8 ({error.reason} at byte {error.start}); convert the file, leave it out "
                "with --exclude or skip broken documents with --on-error skip"
            ) from error

    def _field(self, record: object, key: str) -> str:
        if not isinstance(record, dict):
            raise DataError(
                f"{self.place()}: the document is {type_in_words(record)}, but must be an object with a field {key!r}"
            )
        if key not in record:
            raise DataError(
                f"{self.place()}: the document has no field {key!r}, only {', '.join(map(repr, record))}; choose "
                "fields with --json-keys"
            )
        value = record[key]
        if not isinstance(value, str):
            raise DataError(f"{self.place()}: field {key!r} is {type_in_words(value)}, but must be text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.place()}: character {error.start} of field {key!r} is half of a surrogate pair, which is not "
                "valid text; repair the document, or skip it with --on-error skip"
            ) from error
        return value


def read_documents(piece: FileRange, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of the piece, in order. Blank lines are not documents; of tables only the `keys` are read.

    Raises DataError for a file that cannot be opened, is damaged or cut off, after the documents before the damage.
    """
    if piece.format in ("parquet", "arrow", "dataset"):
        batches = {
            "parquet": lambda: parquet_batches(piece.path, piece.begin, piece.end, keys),
            "arrow": lambda: arrow_batches(piece.path, piece.begin, piece.end, keys),
            "dataset": lambda: dataset_batches(str(piece.path), piece.begin, piece.end),
        }[piece.format]()
        yield from rows_of(piece.path, piece.first_row, batches, keys)
        return
    try:
        with _open(piece) as file:
            yield from _read_lines_or_text(piece, file)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{piece.path} cannot be read ({reason}); repair it or leave it out with --exclude") from error


def _read_lines_or_text(piece: FileRange, file: BinaryIO) -> Iterator[Document]:
    if piece.format == "text":
        try:
            yield RawDocument(piece.path, None, file.read())
        except _BROKEN_COMPRESSION as error:
            if not piece.is_compressed:
                raise
            raise _broken_compression(piece.path, None, error) from error
    elif piece.is_compressed:
        yield from _numbered_lines(piece.path, file)
    else:
        position = piece.begin
        if piece.begin:
            # A line belongs to the piece in which it begins: skip the rest of the one before.
            file.seek(piece.begin - 1)
            position += len(file.readline()) - 1
        while position < piece.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield RawDocument(piece.path, position, line)
            position += len(line)


def _numbered_lines(path: Path, file: BinaryIO) -> Iterator[Document]:
    number = 0
    while True:
        try:
            line = file.readline()
        except _BROKEN_COMPRESSION as error:
            raise _broken_compression(path, number, error) from error
        if not line:
            return
        number += 1
        if line.strip():
            yield RawDocument(path, None, line, number)


_BROKEN_COMPRESSION = (EOFError, OSError, zlib.error)
"""gzip: cut off, not gzip or wrong checksum, damaged. Arrow, which reads .zst, raises OSError for all of them."""


def _broken_compression(path: Path, line: int | None, error: Exception) -> DataError:
    after = "" if line is None else f" after line {line}"
    return DataError(
        f"{path}: the compressed data is damaged or cut off{after} ({error}); copy the file again, leave it out with "
        "--exclude or keep what comes before with --on-error skip"
    )


def _open(piece: FileRange) -> BinaryIO:
    suffix = piece.path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(piece.path, "rb"))
    if suffix == ".zst":
        import pyarrow

        # This reader tells of a file that is cut off; the zstandard library takes it for the end.
        return io.BufferedReader(pyarrow.input_stream(str(piece.path), compression="zstd"), 1 << 16)
    return piece.path.open("rb")


def _line_number(path: Path, offset: int) -> int:
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
