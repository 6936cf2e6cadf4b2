"""BERT samples: [CLS] first part [SEP] second part [SEP], some of their tokens hidden.

A sample is a function of the seed and its number in the order of the run: no mapping is built, no layout changes it,
and an epoch hides other tokens than the one before.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.bert import BertDataConfig
from megapipe.data.bert_masking import Masked, Masking
from megapipe.data.bert_pairs import Parts, SentencePairs
from megapipe.data.bert_vocabulary import BertVocabulary
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import ShardManifest, read_manifest
from megapipe.data.shard_tokenizer import tokenizer_of_shard
from megapipe.data.splits import SplitName
from megapipe.random.draws import Draws


class BertBatch(NamedTuple):
    """b samples of s tokens, at most p of them hidden."""

    tokens: np.ndarray
    """int64 [b, s], with [MASK] and [PAD]."""
    token_types: np.ndarray
    """int64 [b, s], 1 in the second part and its [SEP], else 0."""
    lengths: np.ndarray
    """int64 [b], tokens that are not padding."""
    positions: np.ndarray
    """int64 [b, p], places of the hidden tokens, then zeros."""
    labels: np.ndarray
    """int64 [b, p], what stood there; meaningless where the mask is 0."""
    loss_mask: np.ndarray
    """float32 [b, p], 1 where a token was hidden, else 0."""
    sentence_labels: np.ndarray
    """int64 [b], 1 where the two parts are not as they were in the text."""
    sentence_weights: np.ndarray
    """float32 [b], 0 for samples past the end of a sequential order and without pairs, else 1."""


class BertSamples:
    """Samples of one split of a sentence-split shard. Safe to use from threads.

    shuffle: as for SentencePairs. vocabulary_size: rows of the model's embedding.

    Raises DataError for unusable files, a vocabulary larger than the model's or other than the shard's, and a split
    too small for one sample.
    """

    def __init__(
        self,
        data: BertDataConfig,
        *,
        split: SplitName,
        seed: int,
        vocabulary_size: int,
        shuffle: bool = True,
    ) -> None:
        self.sequence_length = data.sequence_length
        self.max_predictions = data.max_predictions
        self.shard = IndexedDataset(data.prefix)
        self.manifest = manifest = read_manifest(data.prefix)
        self.vocabulary = vocabulary_of(data, manifest)
        if manifest is not None:
            manifest.check_shard(self.shard)
            manifest.check_vocabulary(vocabulary_size)
        if self.vocabulary.size > vocabulary_size:
            raise DataError(
                f"the vocabulary has {self.vocabulary.size} ids, but the model's vocabulary_size is "
                f"{vocabulary_size}; set it to at least {self.vocabulary.size}"
            )
        self._pairs = SentencePairs(
            self.shard,
            split=split,
            shares=data.split,
            sequence_length=data.sequence_length,
            pairs=data.pairs,
            short_probability=data.short_sequence_probability,
            seed=seed,
            shuffle=shuffle,
        )
        self._masking = Masking.of(data, self.vocabulary)
        self.has_pairs = data.pairs != "none"
        self._seed = seed
        self._purpose = f"bert masks of {split}"

    def __len__(self) -> int:
        """Samples per epoch."""
        return len(self._pairs)

    def lengths(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Tokens of samples that are not padding, int64 [b]. Reads no tokens."""
        return np.array([self._length(self._pairs.parts(int(each))) for each in np.asarray(ordinals)], dtype=np.int64)

    def text(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """The tokens of samples as they stand in the text, special ones left out, joined: int64 [n]."""
        found = [self._text(self._pairs.parts(int(each))) for each in np.asarray(ordinals)]
        return np.concatenate([np.concatenate(parts) for parts in found])

    def batch(self, ordinals: npt.ArrayLike) -> BertBatch:
        """Samples with their masks. Raises DataError for an id outside of the vocabulary, naming the shard."""
        numbers = [int(each) for each in np.asarray(ordinals)]
        size, length, most = len(numbers), self.sequence_length, self.max_predictions
        batch = BertBatch(
            tokens=np.full((size, length), self.vocabulary.padding, dtype=np.int64),
            token_types=np.zeros((size, length), dtype=np.int64),
            lengths=np.zeros(size, dtype=np.int64),
            positions=np.zeros((size, most), dtype=np.int64),
            labels=np.zeros((size, most), dtype=np.int64),
            loss_mask=np.zeros((size, most), dtype=np.float32),
            sentence_labels=np.zeros(size, dtype=np.int64),
            sentence_weights=np.zeros(size, dtype=np.float32),
        )
        for row, number in enumerate(numbers):
            parts = self._pairs.parts(number)
            masked, types = self._sample(parts, number)
            batch.lengths[row] = len(types)
            batch.tokens[row, : len(types)] = masked.tokens
            batch.token_types[row, : len(types)] = types
            count = len(masked.positions)
            batch.positions[row, :count] = masked.positions
            batch.labels[row, :count] = masked.labels
            batch.loss_mask[row, :count] = 1.0
            batch.sentence_labels[row] = parts.label
            batch.sentence_weights[row] = float(parts.real and self.has_pairs)
        return batch

    def _sample(self, parts: Parts, ordinal: int) -> tuple[Masked, np.ndarray]:
        """(tokens hidden and seen, token types), padding left out."""
        first, second = self._text(parts)
        vocabulary = self.vocabulary
        special = np.array([vocabulary.classification, vocabulary.separator, vocabulary.separator], dtype=np.int64)
        tokens = np.concatenate([special[:1], first, special[1:2], second, special[2 : self._pairs.num_special]])
        part = np.full(len(tokens), -1, dtype=np.int64)
        part[1 : 1 + len(first)] = 0
        part[2 + len(first) : 2 + len(first) + len(second)] = 1
        types = (np.arange(len(tokens)) > 1 + len(first)).astype(np.int64)
        if not parts.real:
            nothing = np.empty(0, dtype=np.int64)
            return Masked(tokens, nothing, nothing), types
        return self._masking.apply(tokens, part, Draws(self._seed, self._purpose, ordinal)), types

    def _text(self, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of both parts, int64."""
        first, second = (self.shard.tokens[begin:end].astype(np.int64) for begin, end in parts[:2])
        for tokens, (begin, _) in zip((first, second), parts[:2], strict=True):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary.size:
                place = int(np.argmax((tokens < 0) | (tokens >= self.vocabulary.size)))
                raise DataError(
                    f"token {begin + place} of {self.shard.prefix}.bin is {tokens[place]}, outside of the vocabulary "
                    f"of {self.vocabulary.size}: preprocess with the tokenizer that data.tokenizer names"
                )
        return first, second

    def _length(self, parts: Parts) -> int:
        return parts.num_tokens + self._pairs.num_special


def vocabulary_of(data: BertDataConfig, manifest: ShardManifest | None) -> BertVocabulary:
    """Return the vocabulary that `data.tokenizer` names, or the one in the manifest of the shard `data.prefix`.

    Raises DataError for a vocabulary that cannot be read, or that is not the shard's.
    """
    named = data.tokenizer or (tokenizer_of_shard(data.prefix, manifest) if manifest is not None else "")
    if not named:
        raise DataError(
            f"{data.prefix} has no manifest that names its tokenizer: set data.tokenizer to the vocab.txt or "
            "tokenizer.json that it was made with"
        )
    vocabulary = BertVocabulary.read(named)
    if manifest is not None and manifest.vocabulary_size != vocabulary.size:
        raise DataError(
            f"{Path(named)} has {vocabulary.size} ids, but {data.prefix} was made with {manifest.tokenizer}, which "
            f"has {manifest.vocabulary_size}: set data.tokenizer to the shard's own vocabulary"
        )
    return vocabulary
