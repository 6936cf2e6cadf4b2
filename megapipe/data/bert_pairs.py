"""Which tokens of a sentence-split shard a BERT sample holds: found from its number alone, without a mapping.

A split of T tokens has T // m samples an epoch, m being the most tokens that a sample holds. Each has a stretch of m
tokens of its own, in an order that is a keyed permutation, and draws one of its tokens: the sentence there is the
sample's seed. Sentences behind it, then before it, are added while the document has any and the sample is too short.
Whatever the lengths of the documents, every token of a split is as likely to be drawn.
"""

from bisect import bisect_right
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from megapipe.config.bert import SPECIAL_TOKENS
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.splits import SplitName, split_documents
from megapipe.random.draws import Draws
from megapipe.random.permutation import KeyedPermutation

Pairs = Literal["order", "next", "none"]

LONGEST_SEARCH = 10_000
"""Documents that are looked at for one with two sentences."""


class Parts(NamedTuple):
    """Tokens [begin, end) of the shard's .bin for the two parts of a sample; without pairs the second is empty.

    label: 1 where the parts are not as they were in the text. real: whether there is such a sample.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    label: int
    real: bool = True

    @property
    def num_tokens(self) -> int:
        """Of both parts, special tokens not counted."""
        return self.first[1] - self.first[0] + self.second[1] - self.second[0]


NOTHING = Parts((0, 0), (0, 0), 0, real=False)


class SentencePairs:
    """The parts of every sample of one split of a shard. Reads the .idx alone. Safe to use from threads.

    pairs: order, next or none; see config.bert.BertDataConfig. sequence_length: of a sample, special tokens included.
    shuffle: an epoch's stretches come in random order, and epochs without end; else in the text's, once.

    Raises DataError for a split too small for one sample, and for a shard without sentences where pairs need them.
    """

    def __init__(
        self,
        shard: IndexedDataset,
        *,
        split: SplitName,
        shares: str,
        sequence_length: int,
        pairs: Pairs,
        short_probability: float,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._shard = shard
        self._pairs = pairs
        self._short_probability = short_probability
        self._seed = seed
        self._shuffle = shuffle
        self.num_special = SPECIAL_TOKENS if pairs != "none" else SPECIAL_TOKENS - 1
        self.max_tokens = sequence_length - self.num_special
        """Most tokens of a sample, special ones not counted."""
        self._documents = split_documents(shard.num_documents, shares)[split]
        self._begin = shard.document_start(self._documents.start)
        self._num_samples = (shard.document_start(self._documents.stop) - self._begin) // self.max_tokens
        self._purpose = f"bert parts of {split}"
        self._check(split, shares)
        self._order = lru_cache(maxsize=2)(partial(KeyedPermutation, self._num_samples, seed))

    def __len__(self) -> int:
        """Samples per epoch."""
        return self._num_samples

    def parts(self, ordinal: int) -> Parts:
        """Of the sample with this number in the order of the run. Raises DataError where there are no pairs."""
        epoch, position = divmod(ordinal, self._num_samples)
        if not self._shuffle and epoch:
            return NOTHING
        draws = Draws(self._seed, self._purpose, ordinal)
        stretch = self._order(epoch)[position] if self._shuffle else position
        seed_token = self._begin + stretch * self.max_tokens + draws.below(self.max_tokens)
        document, sentence = self._seed_sentence(seed_token)
        target = self.max_tokens
        if draws.chance(self._short_probability):
            target = 2 + draws.below(self.max_tokens - 1)
        if self._pairs == "none":
            begin, end = self._grown(document, sentence, target, at_least=1)
            first, second = self._tokens(begin, end), (0, 0)
            return Parts(_cut(first, self.max_tokens, draws), second, 0)
        return self._pair(document, sentence, target, draws)

    def _pair(self, document: int, sentence: int, target: int, draws: Draws) -> Parts:
        begin, end = self._grown(document, sentence, target, at_least=2)
        pivot = begin + 1 + draws.below(end - begin - 1)
        first, second = self._tokens(begin, pivot), self._tokens(pivot, end)
        changed = draws.chance(0.5)
        if changed and self._pairs == "order":
            first, second = second, first
        elif changed:
            second = self._elsewhere(document, target - (first[1] - first[0]), draws)
        return Parts(*_cut_pair(first, second, self.max_tokens, draws), int(changed))

    def _seed_sentence(self, token: int) -> tuple[int, int]:
        """(document, sentence) of a token; the first of a later document where pairs need more sentences than one."""
        sentence = bisect_right(self._shard.sequence_offsets, token * self._shard.dtype.itemsize) - 1
        document = bisect_right(self._shard.document_indices, sentence) - 1
        if self._pairs == "none" or self._num_sentences(document) > 1:
            return document, sentence
        for step in range(1, LONGEST_SEARCH):
            other = self._documents[(document - self._documents.start + step) % len(self._documents)]
            if self._num_sentences(other) > 1:
                return other, int(self._shard.document_indices[other])
        raise DataError(
            f"{self._shard.prefix}: none of {LONGEST_SEARCH:,} documents after document {document} has two sentences, "
            "which data.pairs needs; preprocess with --split-sentences, or set data.pairs none"
        )

    def _grown(self, document: int, sentence: int, target: int, at_least: int) -> tuple[int, int]:
        """Sentences [begin, end) of the document around `sentence`, until they hold `target` tokens."""
        first, last = self._shard.document_indices[document : document + 2].tolist()
        lengths = self._shard.sequence_lengths
        begin, end, held = sentence, sentence + 1, int(lengths[sentence])
        while (held < target or end - begin < at_least) and end < last:
            held += int(lengths[end])
            end += 1
        while (held < target or end - begin < at_least) and begin > first:
            begin -= 1
            held += int(lengths[begin])
        return begin, end

    def _elsewhere(self, document: int, target: int, draws: Draws) -> tuple[int, int]:
        """Tokens from a random sentence on, of another document of the split."""
        for _ in range(LONGEST_SEARCH):
            other = self._documents[draws.below(len(self._documents))]
            if other != document and self._num_sentences(other):
                sentence = int(self._shard.document_indices[other]) + draws.below(self._num_sentences(other))
                return self._tokens(*self._grown(other, sentence, target, at_least=1))
        raise DataError(
            f"{self._shard.prefix}: data.pairs next needs sentences of other documents, but {LONGEST_SEARCH:,} random "
            f"documents were empty or document {document} itself; set data.pairs order, or add documents"
        )

    def _num_sentences(self, document: int) -> int:
        first, last = self._shard.document_indices[document : document + 2].tolist()
        return int(last - first)

    def _tokens(self, begin: int, end: int) -> tuple[int, int]:
        """Tokens of sentences [begin, end): a shard keeps them back to back."""
        last = end - 1
        item = self._shard.dtype.itemsize
        offsets = self._shard.sequence_offsets
        return int(offsets[begin]) // item, int(offsets[last]) // item + int(self._shard.sequence_lengths[last])

    def _check(self, split: SplitName, shares: str) -> None:
        shard = self._shard
        if self._num_samples == 0:
            raise DataError(
                f"the {split} split has {len(self._documents)} of {shard.num_documents} documents, too few tokens for "
                f"one sample of {self.max_tokens}: give it a larger share than in data.split {shares!r}, lower "
                "data.sequence_length, or add documents"
            )
        if self._pairs != "none" and shard.num_sequences <= shard.num_documents:
            raise DataError(
                f"{shard.prefix} has {shard.num_sequences} sequences in {shard.num_documents} documents, so it is not "
                "split into sentences, but data.pairs needs sentences; preprocess with --split-sentences, or set "
                "data.pairs none and model.sentence_head false"
            )


def _cut(part: tuple[int, int], length: int, draws: Draws) -> tuple[int, int]:
    """A part without what is too much of it; each token of that is taken from the front or the back by a coin."""
    excess = part[1] - part[0] - length
    if excess <= 0:
        return part
    front = draws.heads(excess)
    return part[0] + front, part[1] - (excess - front)


def _cut_pair(
    first: tuple[int, int], second: tuple[int, int], length: int, draws: Draws
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Both parts, tokens taken from the longer one (the second of equals) while they are too long together."""
    one, two = first[1] - first[0], second[1] - second[0]
    if one + two > length:
        most_of_first, most_of_second = (length + 1) // 2, length // 2
        if one <= most_of_first:
            two = length - one
        elif two <= most_of_second:
            one = length - two
        else:
            one, two = most_of_first, most_of_second
    return _cut(first, one, draws), _cut(second, two, draws)
