"""Writer of one .bin/.idx shard: written aside, flushed to disk, renamed; never half a shard, never more than a buffer
in memory."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megapipe.data.durable import flush_folder, flush_to_disk, write_whole
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import ShardManifest, manifest_path
from megapipe.data.shard_format import CODE_OF_DTYPE, bin_path, idx_path, pack_header

LONGEST_SEQUENCE = 2**31 - 1
_CHUNK = 1 << 20


class ShardWriter:
    """Collects documents into `<prefix>.bin.partial` and makes them a shard in `commit`.

        with ShardWriter(prefix, dtype) as writer:
            writer.add_document([tokens])
            writer.commit()

    Leaving the block without a commit removes what was written. A crash leaves at most `.partial` files, which nothing
    reads and the next writer of the same prefix replaces.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        if dtype not in CODE_OF_DTYPE:
            raise DataError(f"a shard cannot hold {dtype}; it can hold {', '.join(map(str, CODE_OF_DTYPE))}")
        self.prefix = str(prefix)
        self.dtype = dtype
        self.num_sequences = self.num_documents = self.num_tokens = 0
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        # Lengths and boundaries go to disk too: a list of them for 10^9 documents would not fit in memory.
        self._tokens, self._lengths, self._boundaries = (self._open(kind) for kind in ("bin", "lengths", "boundaries"))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_document(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> None:
        """Appends one document of any number of sequences. Empty sequences are left out; a document may be empty.

        Raises DataError for a token that the shard's dtype cannot hold.
        """
        for sequence in sequences:
            if len(sequence):
                self._add_sequence(np.asarray(sequence, dtype=np.int64))
        self.num_documents += 1
        self._boundaries.write(np.int64(self.num_sequences).tobytes())

    def append_shard(self, prefix: str | Path) -> None:
        """Appends every document of another shard of the same dtype, without looking at its tokens."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"{prefix} holds {other.dtype}, {self.prefix} holds {self.dtype}: they cannot be joined")
        with bin_path(prefix).open("rb") as tokens:
            shutil.copyfileobj(tokens, self._tokens, _CHUNK)
        for lengths in _chunks(other.sequence_lengths):
            self._lengths.write(lengths.tobytes())
        for boundaries in _chunks(other.document_indices[1:]):
            self._boundaries.write((boundaries + self.num_sequences).tobytes())
        self.num_sequences += other.num_sequences
        self.num_documents += other.num_documents
        self.num_tokens += other.num_tokens

    def commit(self, manifest: ShardManifest | None = None) -> None:
        """Publishes the shard, and its manifest beside it, in place of an older shard of that prefix.

        The .idx is removed first and appears last, so that at every moment there is the old shard, none, or the new.
        """
        for file in (self._tokens, self._lengths, self._boundaries):
            flush_to_disk(file)
        with self._open("idx") as index:
            self._write_index(index)
            flush_to_disk(index)
        folder = bin_path(self.prefix).parent
        for old in (idx_path(self.prefix), manifest_path(self.prefix)):
            old.unlink(missing_ok=True)
        flush_folder(folder)
        os.replace(self._partial("bin"), bin_path(self.prefix))
        flush_folder(folder)
        if manifest is not None:
            write_whole(manifest_path(self.prefix), manifest.to_json().encode())
        os.replace(self._partial("idx"), idx_path(self.prefix))
        flush_folder(folder)
        self.close()

    def close(self) -> None:
        """Closes and removes the partial files. Idempotent."""
        for file in (self._tokens, self._lengths, self._boundaries):
            with suppress(OSError):  # what a full disk did not take is not needed any more
                file.close()
        for kind in ("bin", "lengths", "boundaries", "idx"):
            self._partial(kind).unlink(missing_ok=True)

    def _add_sequence(self, tokens: np.ndarray) -> None:
        limits = np.iinfo(self.dtype)
        low, high = tokens.min(), tokens.max()
        if low < limits.min or high > limits.max:
            raise DataError(
                f"token {low if low < limits.min else high} does not fit into {self.dtype} of shard {self.prefix}; "
                "choose the dtype by the vocabulary size (token_dtype)"
            )
        if len(tokens) > LONGEST_SEQUENCE:
            raise DataError(f"a sequence of {len(tokens)} tokens; the format allows {LONGEST_SEQUENCE}: cut the text")
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self._lengths.write(np.int32(len(tokens)).tobytes())
        self.num_sequences += 1
        self.num_tokens += len(tokens)

    def _write_index(self, index: BinaryIO) -> None:
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

    def _open(self, kind: str) -> BinaryIO:
        return self._partial(kind).open("wb", buffering=_CHUNK)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), _CHUNK):
        yield array[start : start + _CHUNK]
