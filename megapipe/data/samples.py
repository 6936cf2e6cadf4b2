"""GPT samples: windows of consecutive tokens, in an order that is a function of the seed."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from megapipe.config.field_types import real_number
from megapipe.data import DataError
from megapipe.data.manifest import check_ids, open_shards
from megapipe.data.shards import IndexedDataset
from megapipe.random.sampling import KeyedPermutation


class SampleSet(Protocol):
    """Samples of one split. A sample's ordinal is the number of samples that the run consumed before it.

    Lengths and boundaries are computed without reading a token, so every rank can compute them. Thread-safe.
    """

    sequence_length: int
    """Number of predictions of a full sample."""

    def __len__(self) -> int:
        """Return the number of samples until the first one is repeated, or until the end of an order without
        repetition."""
        ...

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the number of predictions in samples: int64 of the shape of `ordinals`, at most sequence_length."""
        ...

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return token ids of samples: int64 [..., sequence_length + 1], filled with zeros after a sample's last
        label."""
        ...

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """Return for each sample the positions p, 0 < p <= its num_labels, at which a document starts, ascending."""
        ...


SplitName = Literal["train", "validation", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)


def parse_shares(text: str) -> tuple[float, float, float]:
    """Return shares with the sum 1 from "949,50,1" (train, validation, test; missing shares are 0).

    Raises DataError unless the text has one to three numbers, none of them negative, not all zero.
    """
    try:
        shares = [real_number(part) for part in text.split(",")]
    except ValueError:
        shares = []
    valid = 1 <= len(shares) <= 3 and all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    if not valid:
        raise DataError(
            f"data.split is {text!r}; it must be one to three numbers of at least 0, not all 0, the shares of "
            f"{', '.join(SPLIT_NAMES)}, for example 949,50,1"
        )
    total = sum(shares)
    train, validation, test = [share / total for share in shares] + [0.0] * (3 - len(shares))
    return train, validation, test


def split_documents(num_documents: int, shares: str) -> dict[SplitName, range]:
    """Return contiguous document ranges of the three splits, rounded as in Megatron-LM: round(cumulative share * n).

    A range may be empty; it is an error only if samples of it are requested.
    """
    ends = [min(num_documents, round(share * num_documents)) for share in accumulate(parse_shares(shares))]
    starts = [0, *ends[:-1]]
    return {name: range(start, end) for name, start, end in zip(SPLIT_NAMES, starts, ends, strict=True)}


FEW = 256
"""Largest number of ordinals whose result is cached, because lengths, boundaries and tokens of a micro-batch use the
same ordinals."""


class EpochOrder:
    """The order of `size` items: in each epoch a permutation keyed by (seed, epoch), or one sequential epoch.

    In a sequential order (`shuffle=False`), ordinals after the end map to `size`.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size = size
        self.shuffle = shuffle
        # Samples are requested one at a time, and all samples of an epoch use the same permutation.
        self._permutation = lru_cache(maxsize=2)(partial(KeyedPermutation, size, seed))
        self._few = lru_cache(maxsize=16)(self._found_bytes)

    def __call__(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return item numbers for sample ordinals: int64 of the same shape. Raises DataError for negative ordinals."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        if ordinals.size > FEW:
            return self._found(ordinals)
        return np.frombuffer(self._few(ordinals.tobytes()), dtype=np.int64).reshape(ordinals.shape)

    def _found(self, ordinals: np.ndarray) -> np.ndarray:
        if ordinals.size and ordinals.min() < 0:
            raise DataError(f"sample ordinal {ordinals.min()} is negative; ordinals start at 0")
        if not self.shuffle:
            return np.asarray(np.minimum(ordinals, self.size))
        epochs, positions = np.divmod(ordinals, self.size)
        items = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            items[here] = self._permutation(int(epoch))(positions[here])
        return items

    def _found_bytes(self, ordinals: bytes) -> bytes:
        return self._found(np.frombuffer(ordinals, dtype=np.int64)).tobytes()


class _Segment(NamedTuple):
    """Tokens [begin, end) of a shard."""

    shard: IndexedDataset
    begin: int
    end: int


class TokenStream:
    """The tokens of documents [first, last) of several shards, concatenated in order.

    Documents are numbered consecutively over the shards. A shard stores its documents one after the other, so a range
    of documents is a range of tokens, and any window of it is found in O(log shards) without an index.
    """

    def __init__(self, shards: Sequence[IndexedDataset], documents: range) -> None:
        self._segments: list[_Segment] = []
        passed = 0
        for shard in shards:
            first = min(max(documents.start - passed, 0), shard.num_documents)
            last = min(max(documents.stop - passed, 0), shard.num_documents)
            begin, end = shard.document_start(first), shard.document_start(last)
            if begin < end:
                self._segments.append(_Segment(shard, begin, end))
            passed += shard.num_documents
        lengths = (segment.end - segment.begin for segment in self._segments)
        self._starts = list(accumulate(lengths, initial=0))
        self.num_tokens = self._starts[-1]

    def read(self, start: int, count: int, vocabulary_size: int | None) -> np.ndarray:
        """Return tokens [start, start + count): int64 [count]. See `check_ids` for the errors."""
        tokens = np.empty(count, dtype=np.int64)
        for shard, begin, end, position in self._pieces(start, count):
            window = shard.window(begin, end)
            check_ids(shard, begin, window, vocabulary_size)
            tokens[position : position + end - begin] = window
        return tokens

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Return positions p, 0 < p < count, where a document starts at token start + p: int64, ascending. Reads no
        tokens."""
        places: list[np.ndarray] = []
        for shard, begin, end, position in self._pieces(start, count):
            if position:  # each shard starts with a document
                places.append(np.array([position]))
            places.append(shard.document_starts_between(begin, end) - begin + position)
        return np.concatenate(places) if places else np.empty(0, dtype=np.int64)

    def _pieces(self, start: int, count: int) -> list[tuple[IndexedDataset, int, int, int]]:
        """Return (shard, begin, end, position in the window) for every shard that a window touches."""
        if start < 0 or start + count > self.num_tokens:
            raise DataError(f"tokens {start} to {start + count} do not exist: the stream has {self.num_tokens} tokens")
        pieces = []
        position, index = 0, bisect_right(self._starts, start) - 1
        while position < count:
            segment = self._segments[index]
            begin = segment.begin + start + position - self._starts[index]
            end = min(segment.end, begin + count - position)
            pieces.append((segment.shard, begin, end, position))
            position += end - begin
            index += 1
        return pieces


class GptSamples:
    """Samples of one split of a corpus. A sample's ordinal is the number of samples that the run consumed before it.

    Window w contains tokens [w * L, w * L + L] of the split's T concatenated tokens, where L is sequence_length: L
    inputs and, shifted by one, L labels, so that windows overlap by one token. If shuffled, ordinal o reads window
    permutation(o mod n) of epoch o // n, where n is the number of windows and (seed, epoch) keys the permutation; the
    last T - 1 - n * L predictions are not used. If sequential (`shuffle=False`, for evaluation), ordinal o reads
    window o, the last window may be shorter, and samples after the end are empty: each prediction is scored once.

    Everything except token ids comes from the .idx files, so every rank can compute it. Thread-safe.

    Raises DataError for unusable shards, a shard with a vocabulary larger than `vocabulary_size`, and a split that is
    too small for one sample.
    """

    def __init__(
        self,
        prefixes: str | Path | Sequence[str | Path],
        *,
        split: SplitName,
        shares: str,
        sequence_length: int,
        seed: int,
        shuffle: bool = True,
        vocabulary_size: int | None = None,
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}; a sample needs at least 1 token")
        paths = [prefixes] if isinstance(prefixes, str | Path) else list(prefixes)
        self.shards, self.manifests = open_shards(paths, vocabulary_size)
        for shard in self.shards:
            shard.search_index()
            if shuffle:
                shard.scatter()
        num_documents = sum(shard.num_documents for shard in self.shards)
        documents = split_documents(num_documents, shares)[split]
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self._stream = TokenStream(self.shards, documents)
        self.num_predictions = max(0, self._stream.num_tokens - 1)
        """Predicted tokens of the split in one epoch: every token except the first."""
        self._num_samples = self.num_predictions // sequence_length
        if not shuffle:
            self._num_samples = -(-self.num_predictions // sequence_length)
        if self._num_samples == 0:
            raise DataError(
                f"the {split} split of {paths[0]} has {len(documents)} of {num_documents} documents and "
                f"{self._stream.num_tokens} tokens, too few for one sample of {sequence_length} + 1: give it a larger "
                f"share than in data.split {shares!r}, lower data.sequence_length, or add documents"
            )
        self._order = EpochOrder(self._num_samples, seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self._num_samples

    def windows(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return window numbers of sample ordinals: int64 of the same shape; len(self) after the end of a sequential
        order."""
        return self._order(ordinals)

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the number of predictions in samples: int64 of the shape of `ordinals`. Reads no tokens.

        The number is L. In a sequential order, it may be smaller in the last sample, and it is 0 after the end.
        """
        return self._num_labels(self._starts_of(ordinals))

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return token ids of samples: int64 [..., L + 1] for ordinals [...], filled with zeros after a sample's last
        label.

        Raises DataError for an id outside [0, vocabulary_size), with shard and position.
        """
        starts = self._starts_of(ordinals)
        tokens = np.zeros((starts.size, self.sequence_length + 1), dtype=np.int64)
        for row, start, count in zip(tokens, starts.flat, self._num_labels(starts).flat, strict=True):
            if count:
                row[: count + 1] = self._stream.read(int(start), int(count) + 1, self.vocabulary_size)
        return tokens.reshape(*starts.shape, -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """Return for each sample the positions p, 0 < p <= L, at which a document starts: int64, ascending. Reads no
        tokens.

        Token p - 1 ends a document (with the end-of-document token, if such tokens were appended), so input and label
        at p - 1 belong to different documents.
        """
        starts = self._starts_of(ordinals)
        windows = zip(starts.flat, self._num_labels(starts).flat, strict=True)
        return [self._stream.document_starts(int(start), int(count) + 1) for start, count in windows]

    def _starts_of(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the first token of each sample in the stream: int64 [...]."""
        return np.asarray(np.minimum(self.windows(ordinals) * self.sequence_length, self.num_predictions))

    def _num_labels(self, starts: np.ndarray) -> np.ndarray:
        return np.clip(self.num_predictions - starts, 0, self.sequence_length)
