"""One run of tokens over consecutive documents of any number of shards, read from anywhere without an index."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset


class _Segment(NamedTuple):
    """Tokens [begin, end) of a shard."""

    shard: IndexedDataset
    begin: int
    end: int


class TokenStream:
    """The tokens of documents [first, last) of several shards, joined in order.

    Documents are numbered through the shards in the order given. Because a shard keeps its documents back to back, a
    document range is a token range, and any window of it is found in O(log shards) with no index.
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

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream: int64 [count]."""
        tokens = np.empty(count, dtype=np.int64)
        for shard, begin, end, position in self._pieces(start, count):
            tokens[position : position + end - begin] = shard.window(begin, end)
        return tokens

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Places p, 0 < p < count, where a document begins at token start + p: int64, ascending. Reads no tokens."""
        places: list[np.ndarray] = []
        for shard, begin, end, position in self._pieces(start, count):
            if position:  # the next shard begins with a document
                places.append(np.array([position]))
            places.append(shard.document_starts_between(begin, end) - begin + position)
        return np.concatenate(places) if places else np.empty(0, dtype=np.int64)

    def locate(self, position: int) -> tuple[IndexedDataset, int]:
        """The shard that holds a token of the stream, and the token's place in it."""
        index = bisect_right(self._starts, position) - 1
        segment = self._segments[index]
        return segment.shard, segment.begin + position - self._starts[index]

    def _pieces(self, start: int, count: int) -> list[tuple[IndexedDataset, int, int, int]]:
        """(shard, begin, end, place in the window) of every shard that a window touches."""
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
