"""Cuts inputs into parts of bounded size, one unit of work each. The cut depends on the inputs alone, never on the
number of workers, so that the joined output does not either."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megapipe.data.preprocess.hub_datasets import dataset_ranges
from megapipe.data.preprocess.inputs import Format, InputFile
from megapipe.data.preprocess.tables import arrow_ranges, parquet_ranges

PART_BYTES = 4 * 2**20


class FileRange(NamedTuple):
    """The documents [begin, end) of a file, counted in what its format can be cut by."""

    path: Path
    begin: int
    """Byte of JSON lines (a line belongs to the piece in which it begins) or of an Arrow message; number of a Parquet
    row group; row of a dataset."""
    end: int
    size: int
    """Bytes of input."""
    format: Format
    is_compressed: bool = False
    first_row: int = 0
    """Of a table: number of the first row, for messages."""


class Part(NamedTuple):
    pieces: tuple[FileRange, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.size for piece in self.pieces)


def cut_into_parts(files: Iterable[InputFile], part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Parts of about `part_bytes`, documents in order. Text files and compressed files are kept whole, since neither
    can be read from its middle; tables are cut between row groups or record batches."""
    pieces: list[FileRange] = []
    size = 0
    for file in files:
        for piece in _cut_file(file, part_bytes):
            pieces.append(piece)
            size += piece.size
            if size >= part_bytes:
                yield Part(tuple(pieces))
                pieces, size = [], 0
    if pieces:
        yield Part(tuple(pieces))


def idle_workers(files: Sequence[InputFile], workers: int) -> str | None:
    """Why workers will have nothing to do although the input is large, and the way out; None where all are busy."""
    if sum(file.size for file in files) <= PART_BYTES or not all(file.is_whole for file in files):
        return None
    busy = sum(1 for _ in cut_into_parts(files, PART_BYTES))
    if busy >= workers:
        return None
    many = f"{len(files)} files keep" if len(files) > 1 else f"{files[0].path} keeps"
    return (
        f"{many} {busy} of {workers} workers busy: compressed and text files cannot be read from their middle; give "
        "them as several files, or as plain JSON lines or Parquet"
    )


def _cut_file(file: InputFile, part_bytes: int) -> Iterator[FileRange]:
    if file.format == "parquet":
        for group, (size, first_row) in enumerate(parquet_ranges(file.path)):
            yield FileRange(file.path, group, group + 1, size, "parquet", first_row=first_row)
    elif file.format == "arrow":
        for begin, end, first_row in arrow_ranges(file.path):
            yield FileRange(file.path, begin, end, end - begin, "arrow", first_row=first_row)
    elif file.format == "dataset":
        for begin, end, size in dataset_ranges(str(file.path), part_bytes):
            yield FileRange(file.path, begin, end, size, "dataset", first_row=begin)
    elif file.is_whole:
        yield FileRange(file.path, 0, file.size, file.size, file.format, file.is_compressed)
    else:
        for begin in range(0, file.size, part_bytes):
            end = min(begin + part_bytes, file.size)
            yield FileRange(file.path, begin, end, end - begin, file.format)
