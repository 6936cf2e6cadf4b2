"""GPT samples of whole documents: what does not fit is put elsewhere, not cut."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.checked_shards import open_shards, outside_vocabulary, unknown_id
from megapipe.data.epoch_order import EpochOrder
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.packing import best_fit
from megapipe.data.splits import SplitName, split_documents
from megapipe.random.permutation import KeyedPermutation

_PIECES = 1
"""Tells the order of equally long pieces from the orders of epochs, which the same seed keys."""


class PackedSamples:
    """Samples of one split of a shard, each filled with whole documents by best fit, at most L + 1 tokens.

    A document of more than L + 1 tokens is cut into pieces of that many, each beginning with the last token of the one
    before, so that every prediction within a document is in one sample. Predictions from one document into the next
    have to be left out of the loss, by `boundaries`. Documents of one token predict nothing and are left out.

    Shuffled, the samples of an epoch come in a keyed order; which documents share a sample depends on the seed alone.
    Packing reads the length of every document at the start and keeps 16 bytes a piece and 16 a sample; unlike
    windows over joined documents it takes time and memory proportional to the documents.

    Raises DataError for unusable shards and a split without any document to learn from.
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
        """Samples per epoch."""
        return self._order.size

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it, those between two documents counted in."""
        return np.asarray(self._labels[self._order(ordinals)])

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it. Raises DataError for an id outside [0, vocabulary_size), naming shard and place."""
        bins = self._order(ordinals)
        tokens = np.zeros((bins.size, self.sequence_length + 1), dtype=np.int64)
        for row, number in zip(tokens, bins.flat, strict=True):
            place = 0
            for piece in self._pieces_of(number):
                start, size = int(self._starts[piece]), int(self._sizes[piece])
                part = self._shard.window(start, start + size)
                unknown = unknown_id(part, self.vocabulary_size)
                if unknown is not None:
                    raise outside_vocabulary(self._shard, start + unknown, self.vocabulary_size)
                row[place : place + size] = part
                place += size
        return tokens.reshape(*bins.shape, -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """As `SampleSet` has it: where another document, or piece of one, begins."""
        found = []
        for number in self._order(ordinals).flat:
            pieces = self._pieces_of(number)
            found.append(np.cumsum(self._sizes[pieces.start : pieces.stop][:-1]))
        return found

    def _pieces_of(self, number: int) -> range:
        """The pieces of a bin; none for the one behind the last."""
        if number == len(self):
            return range(0)
        return range(int(self._firsts[number]), int(self._firsts[number + 1]))


def _token_bounds(shard: IndexedDataset, documents: range) -> npt.NDArray[np.int64]:
    """First token of every document and the end of the last: int64 [documents + 1]."""
    sequences = np.asarray(shard.document_indices[documents.start : documents.stop + 1])
    ends = np.append(shard.sequence_offsets // shard.dtype.itemsize, shard.num_tokens)
    return np.asarray(ends[sequences])


def _pieces(bounds: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First token and number of tokens of every piece: int64 [pieces] each."""
    predictions = np.maximum(np.diff(bounds) - 1, 0)
    counts = -(-predictions // length)
    documents = np.repeat(np.arange(len(predictions)), counts)
    passed = (np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]) * length
    return bounds[documents] + passed, np.minimum(predictions[documents] - passed, length) + 1
