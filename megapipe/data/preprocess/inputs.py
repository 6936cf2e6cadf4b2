"""Inputs of preprocessing: files from paths, patterns and dataset names, their parts, and their checksums."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import xxhash

from megapipe.data import DataError
from megapipe.data.files import checksum_of_file
from megapipe.data.preprocess.tables import (
    DATASET_PREFIX,
    TABLE_RANGES,
    DatasetName,
    dataset_bytes,
    dataset_fingerprint,
    is_saved_dataset,
    with_options,
)

Format = Literal["text", "json_lines", "parquet", "arrow", "dataset"]

FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".json": "json_lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
COMPRESSED_SUFFIXES = (".gz", ".zst")
UNREADABLE_SUFFIXES = (".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".bin", ".idx")

PYTHON_SOURCES = "python-stdlib"
"""Name of an input: the source files of the running Python's standard library, which exist on every machine."""
PYTHON_SOURCES_EXCLUDED = ("site-packages", "dist-packages", "test*", "idlelib", "lib2to3", "pydoc_data", "encodings")


class InputFile(NamedTuple):
    path: Path
    """Path of the file; for a dataset, its complete name, "dataset:..."."""
    size: int
    """Size on disk in bytes."""

    @property
    def format(self) -> Format:
        """Format, which is derived from the file name without .gz or .zst. A .json contains JSON lines, as Megatron-LM
        expects; a file with an unknown suffix is text."""
        if str(self.path).startswith(DATASET_PREFIX):
            return "dataset"
        name = self.path.with_suffix("") if self.is_compressed else self.path
        return FORMAT_OF_SUFFIX.get(name.suffix.lower(), "text")

    @property
    def is_compressed(self) -> bool:
        """Whether the file's name ends in .gz or .zst."""
        return self.path.suffix.lower() in COMPRESSED_SUFFIXES

    @property
    def is_whole(self) -> bool:
        """Whether one worker must read the whole file, because it cannot be read from the middle."""
        return self.format == "text" or self.is_compressed


def find_inputs(
    inputs: Sequence[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    revision: str | None = None,
    stream: bool = False,
) -> list[InputFile]:
    """Return the files of the inputs in their order. Files of one folder are sorted by their path inside it, and files
    of one pattern by their path.

    An input is a file, a folder (all files in it except hidden ones), a glob pattern (** crosses folders),
    `python-stdlib`, a dataset `dataset:NAME[:CONFIGURATION][@SPLIT]`, or the folder of a dataset that was saved to
    disk. In folders and patterns, `include` keeps files whose name or inner path matches one of its patterns, and
    `exclude` drops files if a folder, the name or the inner path matches. A file that is named twice is read once.
    Datasets on the hub are read at `revision` (a branch, tag or commit), and with `stream` without a copy on disk.

    Raises DataError for an input without files, for an unsupported format, and for `revision` or `stream` without a
    dataset on the hub.
    """
    if (revision or stream) and not any(spec.startswith(DATASET_PREFIX) for spec in inputs):
        raise DataError(f"--dataset-revision and --dataset-streaming need an input {DATASET_PREFIX}NAME: remove them")
    paths: dict[Path, None] = {}
    for spec in inputs:
        files = list(_files_of(spec, include, exclude))
        if not files:
            raise DataError(f"input {spec!r} gives no files{_hint(spec, include, exclude)}")
        if spec.startswith(DATASET_PREFIX):
            if not DatasetName.of(spec).name:
                raise DataError(f"input {spec!r} names no dataset: give {DATASET_PREFIX}NAME")
            files = [Path(with_options(spec, revision, stream))]
        paths.update(dict.fromkeys(files))
    return [InputFile(path, _size(path)) for path in paths]


def _size(path: Path) -> int:
    file = InputFile(path, 0)
    if file.format == "dataset":
        return dataset_bytes(str(path))
    if path.suffix.lower() in UNREADABLE_SUFFIXES:
        raise DataError(
            f"{path}: {path.suffix} files cannot be read; convert the file to text, JSON "
            "lines (plain, .gz or .zst), Parquet or Arrow, or leave it out with --exclude"
        )
    if file.is_compressed and file.format in ("parquet", "arrow"):
        raise DataError(f"{path}: {file.format} files cannot be read when compressed as a whole; decompress it first")
    return path.stat().st_size


def _files_of(spec: str, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    if spec == PYTHON_SOURCES:
        library = Path(sysconfig.get_path("stdlib"))
        yield from _files_in_folder(library, include or ["*.py"], [*PYTHON_SOURCES_EXCLUDED, *exclude])
    elif spec.startswith(DATASET_PREFIX) or os.path.isfile(spec):
        yield Path(spec)
    elif is_saved_dataset(spec):
        yield Path(f"{DATASET_PREFIX}{spec}")
    elif os.path.isdir(spec):
        yield from _files_in_folder(Path(spec), include, exclude)
    else:
        matches = sorted(PurePath(match).parts for match in glob.glob(spec, recursive=True) if os.path.isfile(match))
        yield from (Path(*parts) for parts in matches if _is_selected(PurePath(*parts), include, exclude))


def _files_in_folder(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """Yield files sorted by their inner path, folder by folder: the order does not depend on the folder's own path."""
    inner_paths = []
    for current, folders, names in os.walk(folder):
        inner = PurePath(current).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_excluded(inner / name, exclude)]
        inner_paths += [inner / name for name in names if not name.startswith(".")]
    yield from (folder / path for path in sorted(inner_paths) if _is_selected(path, include, exclude))


def _is_selected(path: PurePath, include: Sequence[str], exclude: Sequence[str]) -> bool:
    included = not include or any(fnmatchcase(name, p) for p in include for name in (path.name, path.as_posix()))
    return included and not _is_excluded(path, exclude)


def _is_excluded(path: PurePath, exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in exclude for name in (*path.parts, path.as_posix()))


def _hint(spec: str, include: Sequence[str], exclude: Sequence[str]) -> str:
    if include or exclude:
        return " that pass --include and --exclude"
    if os.path.isdir(spec):
        return ": the folder is empty"
    return f": give a file, a folder, a pattern, {PYTHON_SOURCES} or {DATASET_PREFIX}NAME"


PART_BYTES = 4 * 2**20


class FileRange(NamedTuple):
    """Range [begin, end) of a file, in the units at which its format can be cut."""

    path: Path
    begin: int
    """Start of the range: a byte in a file of JSON lines (a line belongs to the piece in which it starts) or in an
    Arrow file, the number of a row group of a Parquet file, or the number of a row of a dataset."""
    end: int
    size: int
    """Bytes of input."""
    format: Format
    is_compressed: bool = False
    first_row: int = 0
    """Number of the first row of a table, for messages."""


class Part(NamedTuple):
    pieces: tuple[FileRange, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.size for piece in self.pieces)


def cut_into_parts(files: Iterable[InputFile], part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Yield parts of about `part_bytes`, with the documents in order.

    The parts, and therefore the joined output, depend only on the inputs, never on the number of workers. Text files
    and compressed files are not cut, because they cannot be read from the middle. Tables are cut between row groups or
    record batches.
    """
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


def idle_workers(files: Sequence[InputFile], workers: int, part_bytes: int) -> str | None:
    """Return the reason why workers will be idle with a large input, and how to fix it; None if all have work."""
    if sum(file.size for file in files) <= part_bytes or not all(file.is_whole for file in files):
        return None
    busy = sum(1 for _ in cut_into_parts(files, part_bytes))
    if busy >= workers:
        return None
    subject = f"{len(files)} files keep" if len(files) > 1 else f"{files[0].path} keeps"
    return (
        f"{subject} {busy} of {workers} workers busy: compressed and text files cannot be "
        "read from the middle; split them into several files, or use JSON lines or Parquet"
    )


def _cut_file(file: InputFile, part_bytes: int) -> Iterator[FileRange]:
    if file.format in TABLE_RANGES:
        for begin, end, size, first_row in TABLE_RANGES[file.format](file.path, part_bytes):
            yield FileRange(file.path, begin, end, size, file.format, first_row=first_row)
    elif file.is_whole:
        yield FileRange(file.path, 0, file.size, file.size, file.format, file.is_compressed)
    else:
        for begin in range(0, file.size, part_bytes):
            end = min(begin + part_bytes, file.size)
            yield FileRange(file.path, begin, end, end - begin, file.format)


LISTED_SOURCES = 1000
"""Largest number of files in a manifest: with millions of text files, it would be larger than some shards."""


class SourceChecksums:
    """Hashes files in a background thread, while workers read them. Hashing releases the interpreter lock."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._stopped = False
        self._result: Future[dict[str, Any]] = self._pool.submit(self._describe, files)

    def result(self) -> dict[str, Any]:
        """Return the sources for the manifest: number of files, bytes, one checksum over all checksums, and the
        files."""
        return self._result.result()

    def stop(self) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def _describe(self, files: Sequence[InputFile]) -> dict[str, Any]:
        digest = xxhash.xxh3_128()
        listed: list[dict[str, Any]] = []
        for file in files:
            if self._stopped:
                break
            checksum = self._checksum(file)
            digest.update(f"{checksum}\n".encode())
            if len(listed) < LISTED_SOURCES:
                listed.append({"name": str(file.path), "bytes": file.size, "checksum": checksum})
        return {
            "num_files": len(files),
            "num_bytes": sum(file.size for file in files),
            "checksum": f"xxh128:{digest.hexdigest()}",
            "files": listed,
        }

    def _checksum(self, file: InputFile) -> str | None:
        if file.format == "dataset":
            return dataset_fingerprint(str(file.path))
        try:
            return checksum_of_file(file.path, lambda: self._stopped)
        except OSError:  # the reader reports it
            return None
