"""GPT samples: windows of consecutive tokens, in an order that is a function of the seed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.checked_shards import open_shards, outside_vocabulary, unknown_id
from megapipe.data.epoch_order import EpochOrder
from megapipe.data.errors import DataError
from megapipe.data.splits import SplitName, split_documents
from megapipe.data.token_stream import TokenStream


class GptSamples:
    """Samples of one split of a corpus. A sample is named by its ordinal: how many the run consumed before it.

    Window w holds tokens [w * L, w * L + L] of the split's documents joined in order: L inputs and, shifted by one, L
    labels, so that windows overlap by one token. Shuffled, ordinal o reads window permutation(o mod n) of epoch
    o // n, the permutation keyed by (seed, epoch); the last T - 1 - n * L predictions of an epoch are left out.
    Sequential (`shuffle=False`, for evaluation), ordinal o reads window o, the last window may be shorter, and
    ordinals past the end are empty samples, so that every prediction is scored exactly once.

    Everything but the token ids comes from the .idx files, so every rank can know it. Safe to use from threads.

    Raises DataError for unusable shards, a shard whose vocabulary exceeds `vocabulary_size`, and a split too small
    for one sample.
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
        """Predicted tokens of the split in one epoch: every token but the first."""
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
        """Samples per epoch."""
        return self._num_samples

    def windows(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Window numbers of sample ordinals, int64 of the same shape; len(self) past the end of a sequential order."""
        return self._order(ordinals)

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Predictions in samples, int64 of the shape of `ordinals`. Reads no tokens.

        L, less in a sequential order's last sample, 0 past its end.
        """
        return self._num_labels(self._starts_of(ordinals))

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Token ids of samples, int64 [..., L + 1] for ordinals [...]; behind a sample's last label stand zeros.

        Raises DataError for an id outside [0, vocabulary_size), naming shard and place.
        """
        starts = self._starts_of(ordinals)
        tokens = np.zeros((starts.size, self.sequence_length + 1), dtype=np.int64)
        for row, start, count in zip(tokens, starts.flat, self._num_labels(starts).flat, strict=True):
            if count:
                row[: count + 1] = self._stream.read(int(start), int(count) + 1)
                self._check_ids(row[: count + 1], int(start))
        return tokens.reshape(*starts.shape, -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """For each sample the places p, 0 < p <= L, in its tokens at which a document begins: int64, ascending.

        Token p - 1 ends a document (it is the end-of-document token where those were appended), so the label at p - 1
        belongs to another document than its input. Reads no tokens.
        """
        starts = self._starts_of(ordinals)
        windows = zip(starts.flat, self._num_labels(starts).flat, strict=True)
        return [self._stream.document_starts(int(start), int(count) + 1) for start, count in windows]

    def _starts_of(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """First token of each sample in the stream, int64 [...]."""
        return np.asarray(np.minimum(self.windows(ordinals) * self.sequence_length, self.num_predictions))

    def _num_labels(self, starts: np.ndarray) -> np.ndarray:
        return np.clip(self.num_predictions - starts, 0, self.sequence_length)

    def _check_ids(self, tokens: np.ndarray, start: int) -> None:
        place = unknown_id(tokens, self.vocabulary_size)
        if place is not None:
            raise outside_vocabulary(*self._stream.locate(start + place), self.vocabulary_size)
