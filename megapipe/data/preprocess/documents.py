"""Reads the documents of a part of the input. They are read as bytes first, so that one broken document does not stop
the others."""

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, cast

import numpy as np

from megapipe.config.command_line import ProgressBar
from megapipe.data import DataError
from megapipe.data.preprocess.inputs import FileRange, InputFile, cut_into_parts
from megapipe.data.preprocess.tables import arrow_batches, dataset_batches, parquet_batches, rows_of, type_in_words

TEXT_KEY = "text"
"""Name of the only field of a text file."""


class Document(Protocol):
    """A document of any format, before its text is decoded."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return one text per key. Raises DataError with file and line or row."""

    def place(self) -> str:
        """Return the file, with the line or row if there is one."""


@dataclass(frozen=True)
class RawDocument:
    """A line of a file of JSON lines, or a whole text file."""

    path: Path
    offset: int | None
    """First byte of the line, in a file of JSON lines that can be read from any byte."""
    content: bytes
    line: int | None = None
    """Number of the line, if known."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return one text per key. Raises DataError with file and line."""
        if self.offset is None and self.line is None:
            if list(keys) != [TEXT_KEY]:
                raise DataError(
                    f"{self.path} is read as plain text and has the one field {TEXT_KEY!r}, "
                    f"not {', '.join(keys)}; JSON lines need a name that ends in .jsonl"
                )
            return [self._decode()]
        try:
            record = json.loads(self._decode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.place()}: not JSON ({error}); repair it, or use --on-error skip") from error
        return [self._field(record, key) for key in keys]

    def place(self) -> str:
        """Return the file, with the line number if there are lines. Use this only for messages, because it counts all
        lines before the document."""
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
                f"{self.place()}: not UTF-8 ({error.reason} at byte {error.start}); convert "
                "or --exclude the file, or skip broken documents with --on-error skip"
            ) from error

    def _field(self, record: object, key: str) -> str:
        if not isinstance(record, dict):
            raise DataError(
                f"{self.place()}: the document is {type_in_words(record)}, but must be an object with a field {key!r}"
            )
        if key not in record:
            raise DataError(
                f"{self.place()}: the document has no field {key!r}, only "
                f"{', '.join(map(repr, record))}; choose fields with --json-keys"
            )
        value = record[key]
        if not isinstance(value, str):
            raise DataError(f"{self.place()}: field {key!r} is {type_in_words(value)}, but must be text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.place()}: character {error.start} of field {key!r} is half of a "
                "surrogate pair; repair the document, or skip it with --on-error skip"
            ) from error
        return value


def read_documents(piece: FileRange, keys: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of a piece of a file, in order. Blank lines are skipped. Only the columns `keys` of tables
    are read.

    Raises DataError for a file that cannot be opened, is damaged or cut off. Documents before the damage come first.
    """
    if piece.format in ("parquet", "arrow", "dataset"):
        batches = {
            "parquet": lambda: parquet_batches(piece.path, piece.begin, piece.end, keys),
            "arrow": lambda: arrow_batches(piece.path, piece.begin, piece.end),
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
            # A line belongs to the piece in which it starts: skip the rest of the previous line.
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
"""Errors of gzip, in this order: the file is cut off; it is not gzip or has a wrong checksum; its data is damaged.
Arrow, which reads .zst, raises OSError in all these cases."""


def _broken_compression(path: Path, line: int | None, error: Exception) -> DataError:
    after = "" if line is None else f" after line {line}"
    return DataError(
        f"{path}: the compressed data is damaged or cut off{after} ({error}); copy the file "
        "again, leave it out with --exclude or keep what comes before with --on-error skip"
    )


def _open(piece: FileRange) -> BinaryIO:
    suffix = piece.path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(piece.path, "rb"))
    if suffix == ".zst":
        import pyarrow

        # This reader reports a file that is cut off; the zstandard library would treat the cut as the end.
        return io.BufferedReader(pyarrow.input_stream(str(piece.path), compression="zstd"), 1 << 16)
    return piece.path.open("rb")


def _line_number(path: Path, offset: int) -> int:
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


SAMPLE_BYTES = 100_000_000


class SampledTexts:
    """Iterates over the texts of documents, each of which is selected with probability sample_bytes / size of the
    input.

    The selection is the same in every run. on_error: effect of a document that cannot be read: "stop" raises
    DataError, "skip" omits it with a message on stderr, None omits it silently, for callers that report such
    documents later. task: if it is not empty, printed on stderr at the end of an iteration, with the numbers of texts
    and bytes that were read.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        json_keys: Sequence[str],
        on_error: Literal["stop", "skip"] | None,
        sample_bytes: int = SAMPLE_BYTES,
        task: str = "",
    ) -> None:
        self._files = files
        self._keys = json_keys
        self._on_error = on_error
        self._size = max(1, sum(file.size for file in files))
        self._share = sample_bytes / self._size
        self._task = task
        self.num_texts = self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        self.num_texts = self.num_bytes = 0
        chance = np.random.Generator(np.random.Philox(0))
        with closing(ProgressBar("reading texts", self._size / 1e6, "MB", log=True)) as bar:
            for piece in (piece for part in cut_into_parts(self._files) for piece in part.pieces):
                try:
                    for document in read_documents(piece, self._keys):
                        if chance.random() < self._share:
                            yield from self._texts(document)
                except DataError as error:
                    self._leave_out(error)
                bar.advance(piece.size / 1e6)
        if self._task:
            print(f"{self._task} {self}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return f"{self.num_texts:,} texts of {self.num_bytes / 1e6:,.1f} MB"

    def _texts(self, document: Document) -> list[str]:
        try:
            texts = document.texts(self._keys)
        except DataError as error:
            self._leave_out(error)
            return []
        self.num_texts += len(texts)
        self.num_bytes += sum(len(text.encode()) for text in texts)
        return texts

    def _leave_out(self, error: DataError) -> None:
        if self._on_error == "stop":
            raise error
        if self._on_error == "skip":
            print(f"skipped: {error}", file=sys.stderr)
