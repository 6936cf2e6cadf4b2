"""BERT samples: [CLS] first part [SEP] second part [SEP], with some tokens masked.

A sample is a function of the seed and its number in the order of the run. It needs no stored mapping, does not depend
on the layout, and has different masked tokens in each epoch.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.bert import BertDataConfig
from megapipe.data import DataError
from megapipe.data.bert_parts import BertVocabulary, Masked, Masking, Parts, SentencePairs
from megapipe.data.manifest import ShardManifest, check_one_tokenizer, open_shard, tokenizer_of_shard
from megapipe.data.mixing import Blend, BlendOrder
from megapipe.data.samples import SplitName
from megapipe.data.shards import first_outside
from megapipe.random.sampling import Draws


class BertBatch(NamedTuple):
    """A micro-batch of b samples of s tokens, of which at most p are masked."""

    tokens: np.ndarray
    """Inputs with [MASK] and [PAD], int64 [b, s]."""
    token_types: np.ndarray
    """1 in the second part and its [SEP], else 0, int64 [b, s]."""
    lengths: np.ndarray
    """Tokens that are not padding, int64 [b]."""
    positions: np.ndarray
    """Positions of the masked tokens, then zeros, int64 [b, p]."""
    labels: np.ndarray
    """The original tokens at these positions, int64 [b, p]; undefined where the mask is 0."""
    loss_mask: np.ndarray
    """1 where a token was masked, else 0, float32 [b, p]."""
    sentence_labels: np.ndarray
    """1 if the two parts are not in their original order, int64 [b]."""
    sentence_weights: np.ndarray
    """0 for samples after the end of a sequential order and for samples without pairs, else 1, float32 [b]."""


class BertSamples:
    """Samples of one split of a shard of sentences. Thread-safe.

    shuffle: see SentencePairs. vocabulary_size: number of rows of the model's embedding.

    Raises DataError for unusable files, a vocabulary that is larger than the model's or differs from the shard's, and
    a split that is too small for one sample.
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
        self.shard, self.manifest = open_shard(data.prefix, vocabulary_size)
        self.vocabulary = vocabulary_of(data, self.manifest)
        if self.vocabulary.size > vocabulary_size:
            raise DataError(
                f"the vocabulary has {self.vocabulary.size} ids, but the model's "
                f"vocabulary_size is {vocabulary_size}; raise it to at least that"
            )
        self._pairs = SentencePairs(self.shard, data, split=split, seed=seed, shuffle=shuffle)
        self._masking = Masking.of(data, self.vocabulary)
        self.has_pairs = data.pairs != "none"
        self._seed = seed
        self._purpose = f"bert masks of {split}"

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._pairs)

    def lengths(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the number of tokens of each sample without padding: int64 [b]. Reads no tokens."""
        parts = (self._pairs.parts(int(each)) for each in np.asarray(ordinals))
        return np.array([each.num_tokens + self._pairs.num_special for each in parts], dtype=np.int64)

    def text(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the original tokens of samples without special tokens, concatenated: int64 [n]."""
        pairs = [self._text(self._pairs.parts(int(each))) for each in np.asarray(ordinals)]
        return np.concatenate([np.concatenate(parts) for parts in pairs])

    def batch(self, ordinals: npt.ArrayLike) -> BertBatch:
        """Return samples with masked tokens. Raises DataError, with the shard, for an id outside the vocabulary."""
        numbers = [int(each) for each in np.asarray(ordinals)]
        size, length, max_masked = len(numbers), self.sequence_length, self.max_predictions
        batch = BertBatch(
            tokens=np.full((size, length), self.vocabulary.padding, dtype=np.int64),
            token_types=np.zeros((size, length), dtype=np.int64),
            lengths=np.zeros(size, dtype=np.int64),
            positions=np.zeros((size, max_masked), dtype=np.int64),
            labels=np.zeros((size, max_masked), dtype=np.int64),
            loss_mask=np.zeros((size, max_masked), dtype=np.float32),
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
        """Return (sample with masked tokens, token types), without padding."""
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
        """Return the tokens of both parts, int64."""
        first, second = (self.shard.tokens[begin:end].astype(np.int64) for begin, end in parts[:2])
        for tokens, (begin, _) in zip((first, second), parts[:2], strict=True):
            if (place := first_outside(tokens, self.vocabulary.size)) is not None:
                raise DataError(
                    f"token {begin + place} of {self.shard.prefix}.bin is {tokens[place]}, outside of the vocabulary "
                    f"of {self.vocabulary.size}: preprocess with the tokenizer that data.tokenizer names"
                )
        return first, second


def vocabulary_of(data: BertDataConfig, manifest: ShardManifest | None) -> BertVocabulary:
    """Return the vocabulary that `data.tokenizer` names, or the one in the manifest of the shard `data.prefix`.

    Raises DataError for a vocabulary that cannot be read, or that differs from the shard's vocabulary.
    """
    named = data.tokenizer or (tokenizer_of_shard(data.prefix, manifest) if manifest is not None else "")
    if not named:
        raise DataError(
            f"{data.prefix} has no manifest that names its tokenizer: set data.tokenizer to "
            "the vocab.txt or tokenizer.json that it was made with"
        )
    vocabulary = BertVocabulary.read(named)
    if manifest is not None and manifest.vocabulary_size != vocabulary.size:
        raise DataError(
            f"{Path(named)} has {vocabulary.size} ids, but {data.prefix} was made with {manifest.tokenizer}, which "
            f"has {manifest.vocabulary_size}: set data.tokenizer to the vocabulary of the shard"
        )
    return vocabulary


class BlendedBertSamples(Blend[BertSamples]):
    """BERT samples of several corpora, blended in the same order as GPT samples."""

    @property
    def has_pairs(self) -> bool:
        """Whether samples have two parts."""
        return self.corpora[0].has_pairs

    def lengths(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `BertSamples.lengths`."""
        lengths = np.zeros(np.size(ordinals), dtype=np.int64)
        for corpus, rows, within in self.shares(ordinals):
            lengths[rows] = corpus.lengths(within)
        return lengths

    def text(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """See `BertSamples.text`; the samples of each corpus are together."""
        return np.concatenate([corpus.text(within) for corpus, _, within in self.shares(ordinals)])

    def batch(self, ordinals: npt.ArrayLike) -> BertBatch:
        """See `BertSamples.batch`."""
        parts = [(rows, corpus.batch(within)) for corpus, rows, within in self.shares(ordinals)]
        size = np.size(ordinals)
        batch = BertBatch(*(np.zeros((size, *each.shape[1:]), each.dtype) for each in parts[0][1]))
        for rows, part in parts:
            for whole, values in zip(batch, part, strict=True):
                whole[rows] = values
        return batch


def open_bert_samples(
    data: BertDataConfig, *, split: SplitName, seed: int, vocabulary_size: int, shuffle: bool = True
) -> BertSamples | BlendedBertSamples:
    """Return the samples of `data.prefix`, or of the blend. See BertSamples for the arguments and errors.

    Also raises DataError for shards with different tokenizers or vocabularies.
    """
    corpora = [
        BertSamples(
            replace(data, prefix=prefix, blend={}),
            split=split,
            seed=seed,
            vocabulary_size=vocabulary_size,
            shuffle=shuffle,
        )
        for prefix in data.prefixes
    ]
    check_one_tokenizer(corpus.manifest for corpus in corpora)
    for corpus in corpora[1:]:
        if corpus.vocabulary.fingerprint != corpora[0].vocabulary.fingerprint:
            raise DataError(
                f"{corpus.shard.prefix} and {corpora[0].shard.prefix} have different "
                "vocabularies; blend only shards with the same vocabulary"
            )
    if not data.blend:
        return corpora[0]
    return BlendedBertSamples(corpora, BlendOrder(list(data.blend.values())), repeats=shuffle)
