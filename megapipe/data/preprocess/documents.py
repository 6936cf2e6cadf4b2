"""Documents of a piece of input: raw bytes first, so that one broken document does not end the reading."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.data.errors import DataError
from megapipe.data.preprocess.parts import Piece

TEXT_KEY = "text"
"""The field that the content of a text file counts as."""


@dataclass(frozen=True)
class RawDocument:
    path: Path
    offset: int | None
    """First byte of the line in a file of JSON lines, None for a whole file."""
    content: bytes

    def texts(self, keys: Sequence[str]) -> list[str]:
        """One text per key. Raises DataError that names file and line."""
        if self.offset is None:
            if list(keys) != [TEXT_KEY]:
                raise DataError(
                    f"{self.path} is read as plain text and has the one field {TEXT_KEY!r}, not {', '.join(keys)}; "
                    "JSON lines need a name that ends in .jsonl"
                )
            return [self._decode()]
        try:
            record = json.loads(self._decode())
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.place()}: not JSON ({error}); repair the line or skip it with --on-error skip"
            ) from error
        return [self._field(record, key) for key in keys]

    def place(self) -> str:
        """File, and line number where there are lines. Counts the lines before it: for messages only."""
        if self.offset is None:
            return str(self.path)
        return f"{self.path}, line {_line_number(self.path, self.offset)}"

    def _decode(self) -> str:
        try:
            return self.content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.place()}: not UTF-8 ({error.reason} at byte {error.start}); convert the file, leave it out "
                "with --exclude or skip what is broken with --on-error skip"
            ) from error

    def _field(self, record: object, key: str) -> str:
        if not isinstance(record, dict):
            raise DataError(f"{self.place()}: a JSON {type(record).__name__} where an object with {key!r} is needed")
        if key not in record:
            raise DataError(
                f"{self.place()}: no field {key!r}; it has {', '.join(map(repr, record))}: see --json-keys"
            )
        value = record[key]
        if not isinstance(value, str):
            raise DataError(f"{self.place()}: field {key!r} holds a {type(value).__name__}, not a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.place()}: half of a surrogate pair at character {error.start} of field {key!r}, which is no "
                "text; repair it or skip it with --on-error skip"
            ) from error
        return value


def read_documents(piece: Piece) -> Iterator[RawDocument]:
    """The documents that begin in the piece, in order. Blank lines are not documents."""
    with piece.path.open("rb") as file:
        if not piece.is_json_lines:
            yield RawDocument(piece.path, None, file.read())
            return
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


def _line_number(path: Path, offset: int) -> int:
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
