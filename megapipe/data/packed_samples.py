"""GPT samples of whole documents: a document that does not fit into a sample is not cut but put into another one."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data import DataError
from megapipe.data.manifest import check_ids, open_shards
from megapipe.data.samples import EpochOrder, SplitName, split_documents
from megapipe.data.shards import IndexedDataset
from megapipe.random.sampling import KeyedPermutation


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


class PackedSamples:
    """Samples of one split of a shard, each filled with whole documents by best fit, at most L + 1 tokens.

    A document of more than L + 1 tokens is cut into pieces of that length, each starting with the last token of the
    previous one, so that every prediction within a document is in one sample. Predictions from one document to the
    next must be excluded from the loss by `boundaries`. Documents of one token contain no prediction and are omitted.

    If shuffled, the samples of an epoch are in a keyed order. Only the seed decides which documents share a sample.
    Packing reads the length of every document at the start and stores 16 bytes per piece and 16 per sample. Unlike
    windows over concatenated documents, it takes time and memory proportional to the number of documents.

    Raises DataError for unusable shards and a split without a document of at least two tokens.
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
        (self._shard,), self.manifests = open_shards([prefix], vocabulary_size)
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        documents = split_documents(self._shard.num_documents, shares)[split]
        starts, sizes = _pieces(_token_bounds(self._shard, documents), sequence_length)
        if not len(sizes):
            raise DataError(
                f"the {split} split of {prefix} has {len(documents)} of {self._shard.num_documents} documents, none "
                f"of 2 tokens or more: give it a larger share than in data.split {shares!r}, or add documents"
            )
        mixed = KeyedPermutation(len(sizes), seed, _PIECES, 0)(np.arange(len(sizes)))
        descending = np.lexsort((mixed, -sizes))
        bins = np.empty(len(sizes), dtype=np.int64)
        bins[descending] = best_fit(sizes[descending], sequence_length + 1)
        by_bin = np.lexsort((mixed, bins))
        self._starts, self._sizes = starts[by_bin], sizes[by_bin]
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(bins))])
        self._labels = np.append(np.add.reduceat(self._sizes, self._firsts[:-1]) - 1, 0)
        if shuffle:
            self._shard.scatter()
        self._order = EpochOrder(len(self._firsts) - 1, seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self._order.size

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.num_labels`. Predictions between two documents are counted."""
        return np.asarray(self._labels[self._order(ordinals)])

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `SampleSet.tokens`. Raises DataError for an id outside [0, vocabulary_size), with shard and position."""
        bins = self._order(ordinals)
        tokens = np.zeros((bins.size, self.sequence_length + 1), dtype=np.int64)
        for row, number in zip(tokens, bins.flat, strict=True):
            place = 0
            for piece in self._pieces_of(number):
                start, size = int(self._starts[piece]), int(self._sizes[piece])
                part = self._shard.window(start, start + size)
                check_ids(self._shard, start, part, self.vocabulary_size)
                row[place : place + size] = part
                place += size
        return tokens.reshape(*bins.shape, -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """See `SampleSet.boundaries`. A piece of a document counts as a document."""
        starts = []
        for number in self._order(ordinals).flat:
            pieces = self._pieces_of(number)
            starts.append(np.cumsum(self._sizes[pieces.start : pieces.stop][:-1]))
        return starts

    def _pieces_of(self, number: int) -> range:
        """Return the pieces of a bin; none for the number after the last bin."""
        if number == len(self):
            return range(0)
        return range(int(self._firsts[number]), int(self._firsts[number + 1]))


def _token_bounds(shard: IndexedDataset, documents: range) -> npt.NDArray[np.int64]:
    """Return the first token of every document, and the end of the last: int64 [documents + 1]."""
    sequences = np.asarray(shard.document_indices[documents.start : documents.stop + 1])
    ends = np.append(shard.sequence_offsets // shard.dtype.itemsize, shard.num_tokens)
    return np.asarray(ends[sequences])


def _pieces(bounds: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first token and the number of tokens of every piece: int64 [pieces] each."""
    predictions = np.maximum(np.diff(bounds) - 1, 0)
    counts = -(-predictions // length)
    documents = np.repeat(np.arange(len(predictions)), counts)
    passed = (np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]) * length
    return bounds[documents] + passed, np.minimum(predictions[documents] - passed, length) + 1
