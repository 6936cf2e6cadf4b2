"""Memory-mapped reader of one .bin/.idx shard. Opening costs the same for one document and for a billion."""

import mmap
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.shard_format import HEADER, FloatTokens, bin_path, idx_path, parse_header


class IndexedDataset:
    """One shard: sequences of tokens, grouped into documents.

    Attributes (arrays are read-only views of the mapped files):
        dtype: token type of the .bin file
        tokens: [num_tokens], every sequence back to back
        sequence_lengths: int32 [num_sequences], in tokens
        sequence_offsets: int64 [num_sequences], in bytes
        document_indices: int64 [num_documents + 1], sequence numbers at which documents begin, then num_sequences

    float_tokens: what tokens of dtype code 6 or 7 are; None refuses them, since that differs between writers.

    Raises DataError when a file is missing, truncated, of another format or not the other one's partner.
    """

    def __init__(self, prefix: str | Path, float_tokens: FloatTokens | None = None) -> None:
        self.prefix = str(prefix)
        self._map_index(idx_path(prefix), float_tokens)
        self._map_tokens(bin_path(prefix))
        _advise(self._index, "MADV_NORMAL")

    def __len__(self) -> int:
        """Number of sequences."""
        return self.num_sequences

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Tokens of one sequence, in the shard's dtype."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {self.num_sequences}")
        start = int(self.sequence_offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[sequence])]

    def document(self, document: int) -> np.ndarray:
        """Tokens of one document, all its sequences joined, in the shard's dtype."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.prefix}, which has {self.num_documents}")
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_start(self, document: int) -> int:
        """Position in `tokens` at which a document begins; num_tokens for num_documents."""
        sequence = int(self.document_indices[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.sequence_offsets[sequence]) // self.dtype.itemsize

    def document_starts_between(self, begin: int, end: int) -> np.ndarray:
        """Positions p, begin < p < end, at which a document begins: int64, ascending, each once.

        Read from the .idx file alone, by binary search, so that a rank without token ids knows the boundaries too.
        """
        item = self.dtype.itemsize
        # Not numpy.searchsorted: the mapped arrays are unaligned, and it would copy all of them first.
        low = bisect_right(self.sequence_offsets, begin * item)
        high = bisect_left(self.sequence_offsets, end * item)
        first = bisect_left(self.document_indices, low)
        last = bisect_left(self.document_indices, high)
        return np.unique(self.sequence_offsets[self.document_indices[first:last]] // item)

    def search_index(self) -> None:
        """Says that the index will be searched here and there, not read from front to back.

        The kernel then reads the page that a search touches and not, as it would guess, the hundreds behind it.
        """
        _advise(self._index, "MADV_RANDOM")

    def scatter(self) -> None:
        """Says the same of the tokens, which are then to be read by `window`."""
        self._scattered = self._tokens is not None and _advise(self._tokens, "MADV_RANDOM")

    def window(self, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end), in the shard's dtype; after `scatter`, its pages are asked for together."""
        if self._scattered and self._tokens is not None:
            item = self.dtype.itemsize
            first = begin * item // mmap.PAGESIZE * mmap.PAGESIZE
            self._tokens.madvise(mmap.MADV_WILLNEED, first, end * item - first)
        return self.tokens[begin:end]

    def _map_index(self, path: Path, float_tokens: FloatTokens | None) -> None:
        if not path.is_file():
            raise DataError(f"{path} does not exist: give the prefix of a shard without .bin or .idx{_suggest(path)}")
        size = path.stat().st_size
        if not size:
            parse_header(path, b"")
        with path.open("rb") as file:
            self._index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _advise(self._index, "MADV_RANDOM")
        self.dtype, self.num_sequences, self.num_documents = parse_header(
            path, self._index[: HEADER.size], float_tokens
        )
        shapes = [("<i4", self.num_sequences), ("<i8", self.num_sequences), ("<i8", self.num_documents + 1)]
        expected = HEADER.size + sum(np.dtype(kind).itemsize * count for kind, count in shapes)
        if size != expected:
            raise DataError(_wrong_index_size(path, size, expected, self.num_sequences))
        # As plain arrays, because numpy's memmap class makes every access several times slower.
        mapped = np.frombuffer(self._index, dtype=np.uint8)
        arrays, position = [], HEADER.size
        for kind, count in shapes:
            stop = position + np.dtype(kind).itemsize * count
            arrays.append(mapped[position:stop].view(kind))
            position = stop
        self.sequence_lengths, self.sequence_offsets, self.document_indices = arrays
        if self.document_indices[0] != 0 or self.document_indices[-1] != self.num_sequences:
            raise DataError(
                f"{path} is damaged: its documents cover sequences {self.document_indices[0]} to "
                f"{self.document_indices[-1]} instead of 0 to {self.num_sequences}; preprocess again"
            )

    def _map_tokens(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"{path} does not exist, but its index does: copy both files of the shard")
        size = path.stat().st_size
        self.num_tokens = 0
        if self.num_sequences:
            end = int(self.sequence_offsets[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
            self.num_tokens = end // self.dtype.itemsize
        expected = self.num_tokens * self.dtype.itemsize
        if size < expected:
            raise DataError(f"{path} is truncated: {size} bytes, but its index describes {expected}; copy it again")
        if size > expected:
            raise DataError(
                f"{path} has {size} bytes, but its index describes {expected}: the two files are not one shard's"
            )
        self._tokens: mmap.mmap | None = None
        self._scattered = False
        if size:  # an empty file cannot be mapped
            with path.open("rb") as file:
                self._tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.tokens: np.ndarray = np.frombuffer(self._tokens or b"", dtype=self.dtype)


def _advise(mapped: mmap.mmap, advice: str) -> bool:
    """Tell the kernel how a file will be read; whether the system takes such advice."""
    if not hasattr(mmap, advice):
        return False
    mapped.madvise(getattr(mmap, advice))
    return True


def _wrong_index_size(path: Path, size: int, expected: int, num_sequences: int) -> str:
    if size < expected:
        return f"{path} is truncated: {size} bytes, but its header announces {expected}; copy it again"
    if size == expected + num_sequences:
        return f"{path} is the index of a multimodal shard (one mode per sequence), which is not supported"
    return f"{path} has {size} bytes, but its header announces {expected}; the file is damaged: copy it again"


def _suggest(path: Path) -> str:
    """The shards in the same folder, for a misspelt prefix."""
    found = sorted(other.stem for other in path.parent.glob("*.idx")) if path.parent.is_dir() else []
    return f"; {path.parent} holds {', '.join(found[:5])}" if found else ""
