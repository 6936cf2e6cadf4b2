"""Writer of one .bin/.idx shard.

Files are written under other names, flushed to disk and renamed, so that a shard is complete or absent. Memory use is
limited to a buffer.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megapipe.config.files import flush_folder, flush_to_disk, write_whole
from megapipe.data import DataError
from megapipe.data.files import HashedFile
from megapipe.data.manifest import ShardManifest, manifest_path
from megapipe.data.shards import CODE_OF_DTYPE, IndexedDataset, bin_path, idx_path, pack_header

LONGEST_SEQUENCE = 2**31 - 1
_CHUNK = 1 << 20
_KINDS = ("bin", "lengths", "boundaries")


class WriterPosition(NamedTuple):
    """Position up to which a shard has been written, from which a writer can continue after a crash."""

    num_sequences: int
    num_documents: int
    num_tokens: int
    checksums: tuple[str, str, str]
    """Checksums of the partial files so far: tokens, lengths, boundaries."""


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Collects documents in `<prefix>.bin.partial`; `commit` turns them into a shard.

        with ShardWriter(prefix, dtype) as writer:
            writer.add_document([tokens])
            writer.commit()

    Leaving the block without a commit removes the partial files, unless `keep` was called. A crash leaves only
    `.partial` files, which no reader opens and the next writer of the same prefix replaces. A writer with the `resume`
    position of an earlier writer continues there instead, and raises DataError if the files have changed since that
    position. If `durable` is false, the writer does not wait for the disk.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, resume: WriterPosition | None = None, durable: bool = True
    ) -> None:
        if dtype not in CODE_OF_DTYPE:
            raise DataError(f"a shard cannot hold {dtype}; it can hold {', '.join(map(str, CODE_OF_DTYPE))}")
        self.prefix = str(prefix)
        self.dtype = dtype
        self._durable = durable
        self._kept = False
        self.num_sequences = self.num_documents = self.num_tokens = 0
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        # Lengths and boundaries are written to disk too: for 10^9 documents, they would not fit in memory.
        if resume is None:
            files = [HashedFile(self._partial(kind)) for kind in _KINDS]
        else:
            self.num_sequences, self.num_documents, self.num_tokens, checksums = resume
            sizes = (self.num_tokens * dtype.itemsize, self.num_sequences * 4, self.num_documents * 8)
            files = [
                HashedFile.resume(self._partial(kind), size, checksum)
                for kind, size, checksum in zip(_KINDS, sizes, checksums, strict=True)
            ]
        self._files = self._tokens, self._lengths, self._boundaries = files

    def __exit__(self, *error: object) -> None:
        self.close()

    def add_document(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> None:
        """Append one document of any number of sequences. Empty sequences are omitted; a document may be empty.

        Raises DataError for a token that does not fit into the shard's dtype.
        """
        for sequence in sequences:
            if len(sequence):
                self._add_sequence(sequence if isinstance(sequence, np.ndarray) else np.array(sequence, np.int64))
        self.num_documents += 1
        self._boundaries.write(np.int64(self.num_sequences).tobytes())

    def append_shard(self, prefix: str | Path, keep: np.ndarray | None = None) -> None:
        """Append the documents of another shard of the same dtype, without checking its tokens.

        keep: bool [num_documents], true for documents to append; None appends all.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{prefix} has tokens of type {other.dtype}, but {self.prefix} has "
                f"{self.dtype}; only shards of the same type can be joined"
            )
        for begin, end in _runs(keep, other.num_documents):
            self._append_documents(other, begin, end)

    def _append_documents(self, other: IndexedDataset, begin: int, end: int) -> None:
        tokens = other.tokens[other.document_start(begin) : other.document_start(end)]
        first, last = int(other.document_indices[begin]), int(other.document_indices[end])
        for chunk in _chunks(tokens):
            self._tokens.write(chunk.tobytes())
        for chunk in _chunks(other.sequence_lengths[first:last]):
            self._lengths.write(chunk.tobytes())
        for chunk in _chunks(other.document_indices[begin + 1 : end + 1]):
            self._boundaries.write((chunk + (self.num_sequences - first)).tobytes())
        self.num_sequences += last - first
        self.num_documents += end - begin
        self.num_tokens += len(tokens)

    def position(self) -> WriterPosition:
        """Write everything to the disk, and return the position from which a later writer can continue."""
        for file in self._files:
            flush_to_disk(file)
        tokens, lengths, boundaries = (file.checksum() for file in self._files)
        counts = (self.num_sequences, self.num_documents, self.num_tokens)
        return WriterPosition(*counts, (tokens, lengths, boundaries))

    def keep(self) -> None:
        """Keep the partial files from now on if the writer is closed without a commit, so that a later writer can
        continue."""
        self._kept = True

    def discard(self) -> None:
        """Remove the partial files, even after `keep`."""
        self._kept = False
        self.close()

    def commit(self, manifest: ShardManifest | None = None) -> ShardManifest | None:
        """Publish the shard with its manifest, and replace an older shard with the same prefix.

        The .idx is removed first and appears last, so that at every moment there is the old shard, no shard, or the
        new one. Returns the manifest with the checksums of both files.
        """
        for file in self._files:
            file.flush()
        with HashedFile(self._partial("idx")) as index:
            self._write_index(index)
            if self._durable:
                for file in (*self._files, index):
                    flush_to_disk(file)
        folder = bin_path(self.prefix).parent
        for old in (idx_path(self.prefix), manifest_path(self.prefix)):
            old.unlink(missing_ok=True)
        self._flush_folder(folder)
        os.replace(self._partial("bin"), bin_path(self.prefix))
        self._flush_folder(folder)
        if manifest is not None:
            manifest = replace(manifest, bin_checksum=self._tokens.checksum(), idx_checksum=index.checksum())
            write_whole(manifest_path(self.prefix), manifest.to_json().encode())
        os.replace(self._partial("idx"), idx_path(self.prefix))
        self._flush_folder(folder)
        self._kept = False
        self.close()
        return manifest

    def close(self) -> None:
        """Close the partial files, and remove them unless `keep` was called. Idempotent."""
        for file in self._files:
            # Data that did not fit on a full disk is not needed any more.
            with suppress(OSError):
                file.close()
        if not self._kept:
            for kind in (*_KINDS, "idx"):
                self._partial(kind).unlink(missing_ok=True)

    def _add_sequence(self, tokens: np.ndarray) -> None:
        limits = np.iinfo(self.dtype)
        low, high = tokens.min(), tokens.max()
        if low < limits.min or high > limits.max:
            raise DataError(
                f"token {low if low < limits.min else high} does not fit into {self.dtype} of "
                f"shard {self.prefix}; choose the dtype by the vocabulary size (token_dtype)"
            )
        if len(tokens) > LONGEST_SEQUENCE:
            raise DataError(f"a sequence has {len(tokens)} tokens; the format allows {LONGEST_SEQUENCE}: split it")
        self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.write(np.int32(len(tokens)).tobytes())
        self.num_sequences += 1
        self.num_tokens += len(tokens)

    def _write_index(self, index: HashedFile) -> None:
        index.write(pack_header(self.dtype, self.num_sequences, self.num_documents))
        with self._partial("lengths").open("rb") as lengths:
            shutil.copyfileobj(lengths, index, _CHUNK)
        if self.num_sequences:
            offset = 0
            for chunk in _chunks(np.memmap(self._partial("lengths"), dtype="<i4", mode="r")):
                ends = offset + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
                index.write((ends - chunk.astype(np.int64) * self.dtype.itemsize).tobytes())
                offset = int(ends[-1])
        index.write(np.int64(0).tobytes())
        with self._partial("boundaries").open("rb") as boundaries:
            shutil.copyfileobj(boundaries, index, _CHUNK)

    def _partial(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}.partial")

    def _flush_folder(self, folder: Path) -> None:
        if self._durable:
            flush_folder(folder)


def _runs(keep: np.ndarray | None, count: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [begin, end) of consecutive documents to keep."""
    if keep is None:
        yield 0, count
        return
    edges = np.flatnonzero(np.diff(np.concatenate(([False], keep, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), _CHUNK):
        yield array[start : start + _CHUNK]
