"""GPT samples in an order that is a function of the seed: windows of consecutive tokens, or packed whole documents.

A window cuts the documents at its ends. A document that does not fit into a packed sample is put into another one.
"""

import math
from abc import ABC, abstractmethod
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from megapipe.config.field_types import real_number
from megapipe.data import DataError
from megapipe.data.manifest import checked_window, open_shard
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
            f"data.split is {text!r}; it must be one to three numbers of at least 0, not all "
            f"0, the shares of {', '.join(SPLIT_NAMES)}, for example 949,50,1"
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


MAX_CACHED_ORDINALS = 256
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
        self._cached = lru_cache(maxsize=16)(lambda raw: self._items(np.frombuffer(raw, dtype=np.int64)).tobytes())

    def __call__(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return item numbers for sample ordinals: int64 of the same shape. Raises DataError for negative ordinals."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        if ordinals.size > MAX_CACHED_ORDINALS:
            return self._items(ordinals)
        return np.frombuffer(self._cached(ordinals.tobytes()), dtype=np.int64).reshape(ordinals.shape)

    def _items(self, ordinals: np.ndarray) -> np.ndarray:
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


class RangeSamples(ABC):
    """Samples that consist of ranges of a shard's tokens. Raises DataError for an unusable shard."""

    def __init__(self, prefix: str | Path, sequence_length: int, vocabulary_size: int | None) -> None:
        self._shard, self.manifest = open_shard(prefix, vocabulary_size)
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size

    @abstractmethod
    def _ranges(self, ordinals: npt.ArrayLike) -> list[list[tuple[int, int]]]:
        """Return the ranges [begin, end) of the shard's tokens that each sample consists of."""

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return token ids of samples: int64 [..., L + 1] for ordinals [...], filled with zeros after a sample's last
        label.

        Raises DataError for an id outside [0, vocabulary_size), with shard and position.
        """
        tokens = np.zeros((np.size(ordinals), self.sequence_length + 1), dtype=np.int64)
        for row, ranges in zip(tokens, self._ranges(ordinals), strict=True):
            place = 0
            for begin, end in ranges:
                row[place : place + end - begin] = checked_window(self._shard, begin, end, self.vocabulary_size)
                place += end - begin
        return tokens.reshape(*np.shape(ordinals), -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """See `SampleSet.boundaries`. Every range counts as a document."""
        return [
            np.cumsum([end - begin for begin, end in ranges[:-1]], dtype=np.int64) for ranges in self._ranges(ordinals)
        ]


class ShardSamples(RangeSamples):
    """Samples of one split of a shard, in an order that is a function of the seed.

    Raises DataError for an unusable shard, and for a split that is too small for one sample.
    """

    def __init__(
        self,
        prefix: str | Path,
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
        super().__init__(prefix, sequence_length, vocabulary_size)
        documents = split_documents(self._shard.num_documents, shares)[split]
        size = self._arrange(documents, seed, shuffle)
        if size == 0:
            raise DataError(self._shortage(split, f"{len(documents)} of {self._shard.num_documents}", shares))
        if shuffle:
            self._shard.advise_random_tokens()
        self._order = EpochOrder(size, seed, shuffle=shuffle)

    @abstractmethod
    def _arrange(self, documents: range, seed: int, shuffle: bool) -> int:
        """Prepare the samples of the documents, and return their number."""

    @abstractmethod
    def _shortage(self, split: SplitName, documents: str, shares: str) -> str:
        """Return the message for a split without samples. documents: numbers of documents, such as `3 of 100`."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self._order.size


class GptSamples(ShardSamples):
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

    def _arrange(self, documents: range, seed: int, shuffle: bool) -> int:
        self._shard.advise_random_index()
        self._begin = self._shard.document_start(documents.start)
        self._num_tokens = self._shard.document_start(documents.stop) - self._begin
        self.num_predictions = max(0, self._num_tokens - 1)
        """Predicted tokens of the split in one epoch: every token except the first."""
        num_samples, rest = divmod(self.num_predictions, self.sequence_length)
        return num_samples + (rest > 0 and not shuffle)

    def _shortage(self, split: SplitName, documents: str, shares: str) -> str:
        return (
            f"the {split} split of {self._shard.prefix} has {documents} documents and {self._num_tokens} tokens, too "
            f"few for one sample of {self.sequence_length} + 1: give it a larger share than in data.split {shares!r}, "
            "lower data.sequence_length, or add documents"
        )

    def windows(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return window numbers of sample ordinals: int64 of the same shape; len(self) after the end of a sequential
        order."""
        return self._order(ordinals)

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the number of predictions in samples: int64 of the shape of `ordinals`. Reads no tokens.

        The number is L. In a sequential order, it may be smaller in the last sample, and it is 0 after the end.
        """
        return self._num_labels(self._starts_of(ordinals))

    def _ranges(self, ordinals: npt.ArrayLike) -> list[list[tuple[int, int]]]:
        windows = self._token_windows(ordinals)
        return [[(begin, end)] if end - begin > 1 else [] for begin, end in windows]

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """Return for each sample the positions p, 0 < p <= L, at which a document starts: int64, ascending. Reads no
        tokens.

        Token p - 1 ends a document (with the end-of-document token, if such tokens were appended), so input and label
        at p - 1 belong to different documents.
        """
        windows = self._token_windows(ordinals)
        return [self._shard.document_starts_between(begin, end) - begin for begin, end in windows]

    def _starts_of(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the first token of each sample in the shard: int64 [...]."""
        return self._begin + np.minimum(self.windows(ordinals) * self.sequence_length, self.num_predictions)

    def _token_windows(self, ordinals: npt.ArrayLike) -> list[tuple[int, int]]:
        """Return the tokens [begin, end) of each sample in the shard, with the first input and the last label."""
        starts = self._starts_of(ordinals)
        ends = starts + self._num_labels(starts) + 1
        return list(zip(starts.ravel().tolist(), ends.ravel().tolist(), strict=True))

    def _num_labels(self, starts: np.ndarray) -> np.ndarray:
        return np.clip(self._begin + self.num_predictions - starts, 0, self.sequence_length)


def best_fit(sizes: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int64]:
    """Return the bin of every piece, numbered from 0: int64 [pieces]. `capacity` is the size of a bin, and the largest
    size of a piece.

    Best-fit-decreasing bin packing by counts: millions of pieces in about a second. Source: Ding et al., "Fewer
    Truncations Improve Language Modeling", ICML 2024, arXiv 2404.10830, section 3.

    sizes: positive, descending. Each piece is put into the fullest bin that has room for it, or else into a new bin.
    Pieces of equal size are placed together: a bin with room for several stays the fullest one. The cost depends on
    the numbers of distinct sizes and free spaces, not on the number of pieces.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    if not len(sizes):
        return bins
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    """Bit r is set if there is a bin with room r."""
    opened = 0
    changes = np.flatnonzero(np.diff(sizes)) + 1
    for begin, stop in zip([0, *changes.tolist()], [*changes.tolist(), len(sizes)], strict=True):
        size = int(sizes[begin])
        while begin < stop:
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                per_bin = room // size
                chosen = _take(by_room[room], stop - begin, per_bin)
                if not by_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, per_bin = capacity, capacity // size
                needed = -(-(stop - begin) // per_bin)
                chosen = list(range(opened, opened + needed))
                opened += needed
            filled = min(stop - begin, per_bin * len(chosen))
            bins[begin : begin + filled] = np.repeat(chosen, per_bin)[:filled]
            begin += filled
            last = filled - per_bin * (len(chosen) - 1)
            for number, room_left in ((chosen[:-1], room - per_bin * size), (chosen[-1:], room - last * size)):
                if number:
                    by_room[room_left] += number
                    rooms |= 1 << room_left
    return bins


def _take(bins: list[int], pieces: int, per_bin: int) -> list[int]:
    """Remove bins for `pieces` pieces, `per_bin` in each, from the end of a list, and return them."""
    needed = min(len(bins), -(-pieces // per_bin))
    chosen = bins[len(bins) - needed :]
    del bins[len(bins) - needed :]
    return chosen


_PIECES = 1
"""Key that separates the order of pieces of equal length from the orders of epochs, which use the same seed."""


class PackedSamples(ShardSamples):
    """Samples of one split of a shard, each filled with whole documents by best fit, at most L + 1 tokens.

    A document of more than L + 1 tokens is cut into pieces of that length, each starting with the last token of the
    previous one, so that every prediction within a document is in one sample. Predictions from one document to the
    next must be excluded from the loss by `boundaries`. Documents of one token contain no prediction and are omitted.

    If shuffled, the samples of an epoch are in a keyed order. Only the seed decides which documents share a sample.
    Packing reads the length of every document at the start and stores 16 bytes per piece and 16 per sample. Unlike
    windows over concatenated documents, it takes time and memory proportional to the number of documents.

    Raises DataError for unusable shards and a split without a document of at least two tokens.
    """

    def _arrange(self, documents: range, seed: int, shuffle: bool) -> int:
        starts, sizes = _pieces(self._shard.document_bounds(documents), self.sequence_length)
        if not len(sizes):
            return 0
        mixed = KeyedPermutation(len(sizes), seed, _PIECES, 0)(np.arange(len(sizes)))
        descending = np.lexsort((mixed, -sizes))
        bins = np.empty(len(sizes), dtype=np.int64)
        bins[descending] = best_fit(sizes[descending], self.sequence_length + 1)
        by_bin = np.lexsort((mixed, bins))
        self._starts, self._sizes = starts[by_bin], sizes[by_bin]
        firsts = np.concatenate([[0], np.cumsum(np.bincount(bins))])
        self._firsts = np.append(firsts, firsts[-1])  # the bin after the last one is empty
        self._labels = np.append(np.add.reduceat(self._sizes, firsts[:-1]) - 1, 0)
        return len(firsts) - 1

    def _shortage(self, split: SplitName, documents: str, shares: str) -> str:
        return (
            f"the {split} split of {self._shard.prefix} has {documents} documents, none of 2 tokens or more: give it "
            f"a larger share than in data.split {shares!r}, or add documents"
        )

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.num_labels`. Predictions between two documents are counted."""
        return np.asarray(self._labels[self._order(ordinals)])

    def _ranges(self, ordinals: npt.ArrayLike) -> list[list[tuple[int, int]]]:
        ranges = []
        for number in self._order(ordinals).flat:
            pieces = slice(self._firsts[number], self._firsts[number + 1])
            starts = self._starts[pieces]
            ranges.append(list(zip(starts.tolist(), (starts + self._sizes[pieces]).tolist(), strict=True)))
        return ranges


def _pieces(bounds: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first token and the number of tokens of every piece: int64 [pieces] each.

    bounds: see `IndexedDataset.document_bounds`. length: number of predictions of a full piece.
    """
    predictions = np.maximum(np.diff(bounds) - 1, 0)
    counts = -(-predictions // length)
    documents = np.repeat(np.arange(len(predictions)), counts)
    passed = (np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]) * length
    return bounds[documents] + passed, np.minimum(predictions[documents] - passed, length) + 1
