"""Memory-mapped reader of one .bin/.idx shard. Opening costs the same for one document and for a billion."""

import mmap
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.shard_format import HEADER, FloatTokens, bin_path, idx_path, parse_header


class IndexedDataset:
    """One shard: sequences of tokens, grouped into documents.

    dtype: token type of the .bin file. float_tokens: meaning of the dtype codes 6 and 7; None refuses them, since it
    differs between writers.

    Raises DataError when a file is missing, truncated or of another format, or when the two do not belong together.
    The arrays are read-only views of the mapped files. Each access to one first checks that its file still has the
    size that it had when it was opened (a microsecond, and no read), and raises DataError otherwise: reading a mapped
    page that was cut off would kill the process with SIGBUS.
    """

    def __init__(self, prefix: str | Path, float_tokens: FloatTokens | None = None) -> None:
        self.prefix = str(prefix)
        self._map_index(idx_path(prefix), float_tokens)
        self._map_tokens(bin_path(prefix))
        _advise(self._index, "MADV_NORMAL")

    @property
    def tokens(self) -> np.ndarray:
        """[num_tokens], every sequence back to back."""
        if self._tokens is not None:
            _check_size(self._tokens, bin_path(self.prefix))
        return self._token_array

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [num_sequences], in tokens."""
        return self._checked(self._index_arrays[0])

    @property
    def sequence_offsets(self) -> np.ndarray:
        """int64 [num_sequences], in bytes."""
        return self._checked(self._index_arrays[1])

    @property
    def document_indices(self) -> np.ndarray:
        """int64 [num_documents + 1], sequence numbers at which documents start, then num_sequences."""
        return self._checked(self._index_arrays[2])

    def _checked(self, array: np.ndarray) -> np.ndarray:
        _check_size(self._index, idx_path(self.prefix))
        return array

    def __len__(self) -> int:
        """Number of sequences."""
        return self.num_sequences

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Return the tokens of one sequence, in the shard's dtype."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"{self.prefix} has no sequence {sequence}: it has {self.num_sequences}, from 0")
        start = int(self.sequence_offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[sequence])]

    def document(self, document: int) -> np.ndarray:
        """Return the tokens of one document, all its sequences joined, in the shard's dtype."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"{self.prefix} has no document {document}: it has {self.num_documents}, from 0")
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` at which a document starts; num_tokens for num_documents."""
        sequence = int(self.document_indices[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.sequence_offsets[sequence]) // self.dtype.itemsize

    def document_starts_between(self, begin: int, end: int) -> np.ndarray:
        """Return the positions p, begin < p < end, at which a document starts: int64, ascending, each once.

        Read from the .idx file alone, by binary search, so that a rank without token ids knows the boundaries too.
        """
        item = self.dtype.itemsize
        # Not numpy.searchsorted: the mapped arrays are unaligned, and it would copy all of them first.
        offsets, documents = self.sequence_offsets, self.document_indices
        low = bisect_right(offsets, begin * item)
        high = bisect_left(offsets, end * item)
        first = bisect_left(documents, low)
        last = bisect_left(documents, high)
        return np.unique(offsets[documents[first:last]] // item)

    def search_index(self) -> None:
        """Announce that the index will be searched at random places, not read from front to back.

        The kernel then reads the page that a search touches and not the hundreds that follow it.
        """
        _advise(self._index, "MADV_RANDOM")

    def scatter(self) -> None:
        """Announce the same for the tokens, which must then be read by `window`."""
        self._scattered = self._tokens is not None and _advise(self._tokens, "MADV_RANDOM")

    def window(self, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end), in the shard's dtype; after `scatter`, their pages are requested together."""
        tokens = self.tokens
        if self._scattered and self._tokens is not None:
            item = self.dtype.itemsize
            first = begin * item // mmap.PAGESIZE * mmap.PAGESIZE
            self._tokens.madvise(mmap.MADV_WILLNEED, first, end * item - first)
        return tokens[begin:end]

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
        self._index_arrays = arrays
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
                f"{path} has {size} bytes, but its index describes {expected}: the two files are not of the same shard"
            )
        self._tokens: mmap.mmap | None = None
        self._scattered = False
        if size:  # an empty file cannot be mapped
            with path.open("rb") as file:
                self._tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._token_array: np.ndarray = np.frombuffer(self._tokens or b"", dtype=self.dtype)


def _check_size(mapped: mmap.mmap, path: Path) -> None:
    """Raise DataError when the file that is mapped no longer has the size that it had when it was opened."""
    try:
        size = mapped.size()
    except OSError as error:  # for example of a network file system whose server lost the file
        raise DataError(f"{path} can no longer be read: {error.strerror}; {_RESTORE}") from error
    if size != len(mapped):
        raise DataError(
            f"{path} has {size:,} bytes now and had {len(mapped):,} when it was opened: it was changed while in use; "
            f"{_RESTORE}"
        )


_RESTORE = "restore the file and start the same command again, which resumes from the newest checkpoint"


def _advise(mapped: mmap.mmap, advice: str) -> bool:
    """Tell the kernel how a file will be read; return whether the system accepts such advice."""
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
    """Name the shards in the same folder, for a misspelt prefix."""
    shards = sorted(other.stem for other in path.parent.glob("*.idx")) if path.parent.is_dir() else []
    return f"; {path.parent} contains {', '.join(shards[:5])}" if shards else ""
