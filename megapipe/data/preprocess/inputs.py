"""Which files to read: from paths, folders, patterns and names of datasets to one ordered list."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from megapipe.data.errors import DataError
from megapipe.data.preprocess.hub_datasets import (
    DATASET_PREFIX,
    DatasetName,
    dataset_bytes,
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
"""Input name that stands for the sources of the running Python's standard library, a corpus on every machine."""
PYTHON_SOURCES_EXCLUDED = ("site-packages", "dist-packages", "test*", "idlelib", "lib2to3", "pydoc_data", "encodings")


class InputFile(NamedTuple):
    path: Path
    """The file, or for a dataset its whole name, "dataset:..."."""
    size: int
    """Bytes, as they lie on disk."""

    @property
    def format(self) -> Format:
        """By the name without .gz or .zst. .json holds lines, as Megatron-LM expects; unknown names are text."""
        if str(self.path).startswith(DATASET_PREFIX):
            return "dataset"
        name = self.path.with_suffix("") if self.is_compressed else self.path
        return FORMAT_OF_SUFFIX.get(name.suffix.lower(), "text")

    @property
    def is_compressed(self) -> bool:
        """Whether the file's name says that it is compressed, with .gz or .zst."""
        return self.path.suffix.lower() in COMPRESSED_SUFFIXES

    @property
    def is_whole(self) -> bool:
        """Whether one worker has to read all of it, since it cannot be read from its middle."""
        return self.format == "text" or self.is_compressed


def find_inputs(
    inputs: Sequence[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    revision: str | None = None,
    stream: bool = False,
) -> list[InputFile]:
    """Files of the inputs in the order given; those of one folder or pattern sorted by their path inside it.

    An input is a file, a folder (all files in it, hidden ones left out), a glob pattern (** crosses folders),
    `python-stdlib`, a dataset `dataset:NAME[:CONFIGURATION][@SPLIT]`, or the folder of a dataset saved to disk. In
    folders and patterns, `include` keeps the files whose name or inner path matches one of its patterns, `exclude`
    drops those of which a folder, the name or the inner path matches. A file named twice is read once. Datasets of the
    hub are read at `revision` (a branch, tag or commit), and with `stream` without a copy on disk.

    Raises DataError for an input without files, for a format that is not read, and for `revision` or `stream` without
    a dataset of the hub.
    """
    if (revision or stream) and not any(spec.startswith(DATASET_PREFIX) for spec in inputs):
        raise DataError(f"--dataset-revision and --dataset-streaming need an input {DATASET_PREFIX}NAME: remove them")
    found: dict[Path, None] = {}
    for spec in inputs:
        files = list(_files_of(spec, include, exclude))
        if not files:
            raise DataError(f"input {spec!r} gives no files{_hint(spec, include, exclude)}")
        if spec.startswith(DATASET_PREFIX):
            if not DatasetName.of(spec).name:
                raise DataError(f"input {spec!r} names no dataset: give {DATASET_PREFIX}NAME")
            files = [Path(with_options(spec, revision, stream))]
        found.update(dict.fromkeys(files))
    return [InputFile(path, _size(path)) for path in found]


def _size(path: Path) -> int:
    file = InputFile(path, 0)
    if file.format == "dataset":
        return dataset_bytes(str(path))
    if path.suffix.lower() in UNREADABLE_SUFFIXES:
        raise DataError(
            f"{path}: {path.suffix} files cannot be read; convert the file to text, JSON lines (plain, .gz or .zst), "
            "Parquet or Arrow, or leave it out with --exclude"
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
        yield from (Path(*parts) for parts in matches if _wanted(PurePath(*parts), include, exclude))


def _files_in_folder(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """Sorted by inner path, folder by folder, so that the order is the same wherever the folder lies."""
    inner_paths = []
    for current, folders, names in os.walk(folder):
        inner = PurePath(current).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _excluded(inner / name, exclude)]
        inner_paths += [inner / name for name in names if not name.startswith(".")]
    yield from (folder / path for path in sorted(inner_paths) if _wanted(path, include, exclude))


def _wanted(path: PurePath, include: Sequence[str], exclude: Sequence[str]) -> bool:
    included = not include or any(fnmatchcase(name, p) for p in include for name in (path.name, path.as_posix()))
    return included and not _excluded(path, exclude)


def _excluded(path: PurePath, exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in exclude for name in (*path.parts, path.as_posix()))


def _hint(spec: str, include: Sequence[str], exclude: Sequence[str]) -> str:
    if include or exclude:
        return " that pass --include and --exclude"
    if os.path.isdir(spec):
        return ": the folder is empty"
    return f": give a file, a folder, a pattern, {PYTHON_SOURCES} or {DATASET_PREFIX}NAME"
