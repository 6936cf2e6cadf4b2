"""The order in which Megatron-LM draws samples, for runs that are to be compared with its own batch by batch.

Unlike the project's own order it is built at the start, for a number of samples that has to be known, in time and
memory proportional to the documents and samples of the run.
Source: megatron-core's GPTDataset, whose indices are compared token by token in tests.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.checked_shards import open_shards, outside_vocabulary, unknown_id
from megapipe.data.errors import DataError
from megapipe.data.splits import SplitName, split_documents

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled by itself when less than this share of it is needed."""


class MegatronSamples:
    """Samples of one split of a shard in Megatron-LM's order. What it splits and shuffles are sequences.

    The split's sequences, E epochs of them shuffled together, are joined; sample w holds tokens [w * L, w * L + L].
    Ordinal o reads sample shuffle[o]. num_samples: how many are wanted, which decides how many epochs are shuffled
    and so the order of all.

    Raises DataError for unusable shards, a split too small for one sample, and ordinals behind the last sample.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        split: SplitName,
        shares: str,
        sequence_length: int,
        seed: int,
        num_samples: int,
        vocabulary_size: int | None = None,
    ) -> None:
        (self._shard,), self.manifests = open_shards([prefix], vocabulary_size)
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        sequences = split_documents(self._shard.num_sequences, shares)[split]
        lengths = self._shard.sequence_lengths[sequences.start : sequences.stop].astype(np.int64)
        per_epoch = int(lengths.sum())
        if per_epoch <= sequence_length:
            raise DataError(
                f"the {split} split of {prefix} has {len(sequences)} of {self._shard.num_sequences} sequences and "
                f"{per_epoch} tokens, too few for one sample of {sequence_length} + 1: give it a larger share than in "
                f"data.split {shares!r}, lower data.sequence_length, or add documents"
            )
        epochs = max(1, -(-(num_samples * sequence_length + 1) // per_epoch))
        self._num_samples = (epochs * per_epoch - 1) // sequence_length
        without_last = ((epochs - 1) * per_epoch - 1) // sequence_length
        needed = num_samples - without_last
        separate = epochs > 1 and needed < int(SEPARATE_BELOW * ((per_epoch - 1) // sequence_length))

        # The numbers are drawn in Megatron-LM's order: documents, then samples.
        generator = np.random.RandomState(seed)
        shuffled = [epochs - 1, 1] if separate else [epochs]
        self._sequences = np.concatenate([_shuffled_sequences(sequences, each, generator) for each in shuffled])
        ranges = [(0, without_last), (without_last, self._num_samples)] if separate else [(0, self._num_samples)]
        self._shuffle = np.concatenate([_shuffled_range(*each, generator) for each in ranges])
        self._starts = np.concatenate([[0], np.cumsum(lengths[self._sequences - sequences.start])])
        """Place of every sequence of all epochs in their joined tokens."""

    def __len__(self) -> int:
        """Samples of all epochs that were shuffled."""
        return self._num_samples

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it: every sample is full."""
        return np.full_like(self._windows(ordinals), self.sequence_length)

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it. Raises DataError for an id outside [0, vocabulary_size), naming shard and place."""
        windows = self._windows(ordinals)
        tokens = np.empty((windows.size, self.sequence_length + 1), dtype=np.int64)
        for row, window in zip(tokens, windows.flat, strict=True):
            self._read(int(window) * self.sequence_length, row)
        return tokens.reshape(*windows.shape, -1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """As `SampleSet` has it, every sequence counted as a document."""
        found = []
        for window in self._windows(ordinals).flat:
            start = int(window) * self.sequence_length
            bounds = np.searchsorted(self._starts, [start, start + self.sequence_length], side="right")
            found.append(np.unique(self._starts[bounds[0] : bounds[1]]) - start)
        return found

    def _windows(self, ordinals: npt.ArrayLike) -> np.ndarray:
        ordinals = np.asarray(ordinals, dtype=np.int64)
        if ordinals.size and (ordinals.min() < 0 or ordinals.max() >= self._num_samples):
            raise DataError(
                f"sample {ordinals.max()} of {self._shard.prefix} does not exist: data.order megatron was made for "
                f"{self._num_samples} samples, those of training.steps; set training.steps to the run's full length, "
                "and training.stop_at to end early"
            )
        return np.asarray(self._shuffle[ordinals].astype(np.int64))

    def _read(self, start: int, row: np.ndarray) -> None:
        """Fill `row` with the joined tokens from `start` on."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        place = 0
        while place < len(row):
            sequence, offset = int(self._sequences[index]), start + place - int(self._starts[index])
            part = self._shard[sequence][offset : offset + len(row) - place]
            row[place : place + len(part)] = part
            unknown = unknown_id(part, self.vocabulary_size)
            if unknown is not None:
                position = int(self._shard.sequence_offsets[sequence]) // self._shard.dtype.itemsize + offset + unknown
                raise outside_vocabulary(self._shard, position, self.vocabulary_size)
            place += len(part)
            index += 1


def _shuffled_sequences(sequences: range, epochs: int, generator: np.random.RandomState) -> npt.NDArray[np.int32]:
    index = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), epochs)
    generator.shuffle(index)
    return index


def _shuffled_range(first: int, stop: int, generator: np.random.RandomState) -> np.ndarray:
    index = np.arange(first, stop, dtype=np.uint32 if stop < 2**32 - 2 else np.int64)
    generator.shuffle(index)
    return index
