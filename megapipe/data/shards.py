"""One .bin/.idx shard: its format, and a memory-mapped reader that opens a billion documents as fast as one.

The format is byte for byte the little-endian format of Megatron-LM. `<prefix>.bin` contains only the tokens,
consecutively. `<prefix>.idx` contains

    9 bytes   magic "MMIDIDX" and two zeros
    u64       version, 1
    u8        dtype code of the tokens
    u64       S, number of sequences
    u64       D, number of documents + 1
    i32 [S]   sequence lengths in tokens
    i64 [S]   sequence offsets in bytes, the running sum of the lengths
    i64 [D]   document boundaries as sequence numbers: the first is 0, the last is S

A document is a range of sequences (one, unless it was split into sentences); an empty document has none.
"""

import mmap
import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Literal

import numpy as np

from megapipe.data import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

FLOAT_CODES = (6, 7)
"""Codes of float types. Megatron-LM: 6 is float64 and 7 is float32. GPT-NeoX: the reverse. Old versions of
Megatron-LM: both are float64."""
FloatTokens = Literal["float32", "float64"]

LARGEST_UINT16_VOCABULARY = 65_500
"""Megatron-LM writes uint16 for vocabularies below this size (not below 65,536), and its readers expect this."""


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the token type of a shard for a vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocabulary_size < LARGEST_UINT16_VOCABULARY else "<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the tokens of the shard `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index of the shard `prefix`."""
    return Path(f"{prefix}.idx")


def first_outside(tokens: np.ndarray, vocabulary_size: int) -> int | None:
    """Return the position of the first token outside [0, vocabulary_size); None if there is none."""
    if not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary_size:
        return None
    return int(np.argmax((tokens < 0) | (tokens >= vocabulary_size)))


def check_exists(prefix: str | Path) -> None:
    """Raise DataError if there is no shard of this prefix."""
    path, folder = idx_path(prefix), Path(prefix)
    if path.is_file():
        return
    if str(prefix) and folder.is_dir():
        shards = sorted(each.with_suffix("") for each in folder.glob("*.idx"))
        raise DataError(
            f"{prefix} is a folder; give the prefix of a shard in it, such as {shards[0]}"
            if shards
            else f"{prefix} is a folder without shards; megapipe preprocess --input {prefix} writes one from its texts"
        )
    raise DataError(f"{path} does not exist: give the prefix of a shard without .bin or .idx{_suggest(path)}")


def pack_header(dtype: np.dtype, num_sequences: int, num_documents: int) -> bytes:
    """Return the first 34 bytes of an .idx file, which `parse_header` reads."""
    return HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], num_sequences, num_documents + 1)


def parse_header(path: Path, header: bytes, float_tokens: FloatTokens | None = None) -> tuple[np.dtype, int, int]:
    """Return (token dtype, number of sequences, number of documents) from the first 34 bytes of an .idx file.

    float_tokens: meaning of the dtype codes 6 and 7 in this file; None refuses them.

    Raises DataError for a short header, a wrong magic or version, and a dtype code that is unknown or ambiguous.
    """
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise DataError(
            f"{path} is not the index of a .bin/.idx shard: it starts with {header[:9]!r} "
            f"instead of {MAGIC!r}; write the shard with megapipe preprocess"
        )
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated: {len(header)} bytes, but the header alone takes {HEADER.size}; {_REDO}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} can be read")
    if code in FLOAT_CODES and float_tokens is None:
        raise DataError(
            f"{path} holds tokens of dtype code {code}: a float type that differs between "
            "forks of Megatron-LM; name it to write integers: megapipe data merge "
            f"{path.with_suffix('')} --float-tokens float32 (or float64) --output-prefix ..."
        )
    if code not in (*DTYPE_OF_CODE, *FLOAT_CODES):
        raise DataError(f"{path} holds tokens of unknown dtype code {code}; known codes are {sorted(DTYPE_OF_CODE)}")
    if num_boundaries == 0:
        raise DataError(f"{path} has no document boundaries, not even the first; {_REDO}")
    dtype = np.dtype(float_tokens).newbyteorder("<") if code in FLOAT_CODES else DTYPE_OF_CODE[code]
    return dtype, num_sequences, num_boundaries - 1


_REDO = "the file is damaged or incomplete: copy it again or preprocess again"


class IndexedDataset:
    """One shard: sequences of tokens, grouped into documents.

    dtype: token type of the .bin file. float_tokens: meaning of the dtype codes 6 and 7, which differs between
    writers; None refuses them.

    Raises DataError if a file is missing, truncated or in another format, or if the two files do not belong together.
    The arrays are read-only views of the mapped files. Each access first checks that the file still has the size that
    it had when it was opened (this takes a microsecond and reads nothing), and raises DataError otherwise, because
    reading a mapped page after the end of a truncated file would kill the process with SIGBUS.
    """

    def __init__(self, prefix: str | Path, float_tokens: FloatTokens | None = None) -> None:
        self.prefix = str(prefix)
        self._map_index(idx_path(prefix), float_tokens)
        self._map_tokens(bin_path(prefix))
        _advise(self._index, "MADV_NORMAL")

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of all sequences, concatenated: [num_tokens]."""
        if self._tokens is not None:
            _check_size(self._tokens, bin_path(self.prefix))
        return self._token_array

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Lengths in tokens: int32 [num_sequences]."""
        return self._checked(self._index_arrays[0])

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Offsets in bytes: int64 [num_sequences]."""
        return self._checked(self._index_arrays[1])

    @property
    def document_indices(self) -> np.ndarray:
        """Sequence numbers at which documents start, then num_sequences: int64 [num_documents + 1]."""
        return self._checked(self._index_arrays[2])

    def _checked(self, array: np.ndarray) -> np.ndarray:
        _check_size(self._index, idx_path(self.prefix))
        return array

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.num_sequences

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Return the tokens of one sequence, in the shard's dtype."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"{self.prefix} has no sequence {sequence}: it has {self.num_sequences}, from 0")
        start = self.sequence_start(sequence)
        return self.tokens[start : start + int(self.sequence_lengths[sequence])]

    def document(self, document: int) -> np.ndarray:
        """Return the tokens of one document, all its sequences concatenated, in the shard's dtype."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"{self.prefix} has no document {document}: it has {self.num_documents}, from 0")
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` at which a document starts; num_tokens for num_documents."""
        return self.sequence_start(int(self.document_indices[document]))

    def sequence_start(self, sequence: int) -> int:
        """Return the position in `tokens` at which a sequence starts; num_tokens for num_sequences."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.sequence_offsets[sequence]) // self.dtype.itemsize

    def document_bounds(self, documents: range) -> np.ndarray:
        """Return the first token of each of the documents, and the end of the last: int64 [documents + 1]."""
        ends = np.append(self.sequence_offsets // self.dtype.itemsize, self.num_tokens)
        return np.asarray(ends[self.document_indices[documents.start : documents.stop + 1]])

    def document_starts_between(self, begin: int, end: int) -> np.ndarray:
        """Return the positions p, begin < p < end, at which a document starts: int64, ascending, without repetition.

        This reads only the .idx file, by binary search. A rank without token ids can call it too.
        """
        item = self.dtype.itemsize
        # numpy.searchsorted would first copy the mapped arrays, because they are unaligned.
        offsets, documents = self.sequence_offsets, self.document_indices
        low = bisect_right(offsets, begin * item)
        high = bisect_left(offsets, end * item)
        first = bisect_left(documents, low)
        last = bisect_left(documents, high)
        return np.unique(offsets[documents[first:last]] // item)

    def advise_random_index(self) -> None:
        """Tell the kernel that the index is accessed randomly.

        The kernel then reads only the page that a search touches, and not hundreds of pages after it.
        """
        _advise(self._index, "MADV_RANDOM")

    def advise_random_tokens(self) -> None:
        """Tell the kernel that the tokens are accessed randomly. They must then be read by `window`."""
        self._random_tokens = self._tokens is not None and _advise(self._tokens, "MADV_RANDOM")

    def window(self, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end) in the shard's dtype. After `advise_random_tokens`, request all pages at once."""
        tokens = self.tokens
        if self._random_tokens and self._tokens is not None:
            item = self.dtype.itemsize
            first = begin * item // mmap.PAGESIZE * mmap.PAGESIZE
            self._tokens.madvise(mmap.MADV_WILLNEED, first, end * item - first)
        return tokens[begin:end]

    def _map_index(self, path: Path, float_tokens: FloatTokens | None) -> None:
        check_exists(self.prefix)
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
        # These are plain arrays, because each access to numpy's memmap class takes several times as long.
        self._index_arrays: list[np.ndarray] = []
        position = HEADER.size
        for kind, count in shapes:
            self._index_arrays.append(np.frombuffer(self._index, kind, count, position))
            position += self._index_arrays[-1].nbytes
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
                f"{path} has {size} bytes, but its index describes {expected}: the files belong to different shards"
            )
        self._tokens: mmap.mmap | None = None
        self._random_tokens = False
        if size:  # an empty file cannot be mapped
            with path.open("rb") as file:
                self._tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._token_array: np.ndarray = np.frombuffer(self._tokens or b"", dtype=self.dtype)


def _check_size(mapped: mmap.mmap, path: Path) -> None:
    """Raise DataError if a mapped file no longer has the size that it had when it was opened."""
    try:
        size = mapped.size()
    except OSError as error:
        # For example on a network file system, if the server lost the file.
        raise DataError(f"{path} can no longer be read: {error.strerror}; {_RESTORE}") from error
    if size != len(mapped):
        raise DataError(
            f"{path} has {size:,} bytes now and had {len(mapped):,} when it was opened: it "
            f"was changed while in use; {_RESTORE}"
        )


_RESTORE = "restore the file and start the same command again, which resumes from the newest checkpoint"


def _advise(mapped: mmap.mmap, advice: str) -> bool:
    """Tell the kernel how a file will be read; return whether the system accepts this advice."""
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
    """Return a hint with the shards in the same folder, for a misspelled prefix."""
    shards = sorted(other.stem for other in path.parent.glob("*.idx")) if path.parent.is_dir() else []
    return f"; {path.parent} contains {', '.join(shards[:5])}" if shards else ""
