"""BERT samples of several corpora in given proportions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megapipe.config.bert import BertDataConfig
from megapipe.data.bert_samples import BertBatch, BertSamples
from megapipe.data.blend_order import BlendOrder
from megapipe.data.checked_shards import check_one_tokenizer
from megapipe.data.errors import DataError
from megapipe.data.splits import SplitName


class BlendedBertSamples:
    """Sample o of the blend is the next sample of the corpus that the order gives o to, in the samples' own words.

    The order is that of GPT's blends. With `shuffle` every corpus goes through its own epochs; without, what lies
    behind the first corpus's end is empty samples, so that the proportions hold for all that is read (evaluation).
    """

    def __init__(self, corpora: Sequence[BertSamples], weights: Sequence[float], *, shuffle: bool) -> None:
        self.corpora = tuple(corpora)
        self.sequence_length = corpora[0].sequence_length
        self.has_pairs = corpora[0].has_pairs
        self._order = BlendOrder(weights)
        self._repeats = shuffle
        ends = [self._order.ordinal_of(index, len(corpus)) for index, corpus in enumerate(corpora)]
        self._num_samples = min(ends)

    def __len__(self) -> int:
        """Samples until the first corpus is used up."""
        return self._num_samples

    def lengths(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `BertSamples` has it."""
        numbers = _numbers(ordinals)
        found = np.zeros(len(numbers), dtype=np.int64)
        for corpus, rows, within in self._shares(numbers):
            found[rows] = corpus.lengths(within)
        return found

    def text(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `BertSamples` has it, corpus by corpus."""
        return np.concatenate([corpus.text(within) for corpus, _, within in self._shares(_numbers(ordinals))])

    def batch(self, ordinals: npt.ArrayLike) -> BertBatch:
        """As `BertSamples` has it."""
        numbers = _numbers(ordinals)
        shares = [(rows, corpus.batch(within)) for corpus, rows, within in self._shares(numbers)]
        found = BertBatch(*(np.zeros((len(numbers), *each.shape[1:]), each.dtype) for each in shares[0][1]))
        for rows, part in shares:
            for whole, values in zip(found, part, strict=True):
                whole[rows] = values
        return found

    def _shares(self, numbers: np.ndarray) -> Iterator[tuple[BertSamples, np.ndarray, np.ndarray]]:
        """For each corpus that is asked: itself, its rows of the batch, and its own ordinals for them."""
        corpora, within = self._order.assign(numbers)
        if not self._repeats:
            # Behind the blend's end stand the empty samples behind the end of some corpus.
            beyond = numbers >= self._num_samples
            corpora[beyond], within[beyond] = 0, len(self.corpora[0])
        for index in np.unique(corpora):
            rows = np.flatnonzero(corpora == index)
            yield self.corpora[index], rows, within[rows]


def open_bert_samples(
    data: BertDataConfig, *, split: SplitName, seed: int, vocabulary_size: int, shuffle: bool = True
) -> BertSamples | BlendedBertSamples:
    """The samples of `data.prefix`, or of the blend; arguments as for BertSamples.

    Raises DataError as BertSamples does, and for shards of different tokenizers or vocabularies.
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
    check_one_tokenizer([corpus.manifest for corpus in corpora if corpus.manifest is not None])
    for corpus in corpora[1:]:
        if not corpus.vocabulary.same(corpora[0].vocabulary):
            raise DataError(
                f"{corpus.shard.prefix} and {corpora[0].shard.prefix} have different vocabularies; blend only "
                "shards with the same vocabulary"
            )
    if not data.blend:
        return corpora[0]
    return BlendedBertSamples(corpora, list(data.blend.values()), shuffle=shuffle)


def _numbers(ordinals: npt.ArrayLike) -> np.ndarray:
    return np.asarray(ordinals, dtype=np.int64).reshape(-1)
