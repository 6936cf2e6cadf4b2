"""Cuts inputs into parts of bounded size, one unit of work each. The cut depends on the inputs alone, never on the
number of workers, so that the joined output does not either."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megapipe.data.preprocess.inputs import InputFile

PART_BYTES = 4 * 2**20


class Piece(NamedTuple):
    """The documents of a file that begin in bytes [begin, end)."""

    path: Path
    begin: int
    end: int
    is_json_lines: bool


class Part(NamedTuple):
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.end - piece.begin for piece in self.pieces)


def cut_into_parts(files: Iterable[InputFile], part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Parts of about `part_bytes`, documents in order: JSON lines cut by byte range, other files kept whole."""
    pieces: list[Piece] = []
    size = 0
    for file in files:
        for piece in _cut_file(file, part_bytes):
            pieces.append(piece)
            size += piece.end - piece.begin
            if size >= part_bytes:
                yield Part(tuple(pieces))
                pieces, size = [], 0
    if pieces:
        yield Part(tuple(pieces))


def _cut_file(file: InputFile, part_bytes: int) -> Iterator[Piece]:
    if not file.is_json_lines:
        yield Piece(file.path, 0, file.size, False)
        return
    for begin in range(0, file.size, part_bytes):
        yield Piece(file.path, begin, min(begin + part_bytes, file.size), True)
