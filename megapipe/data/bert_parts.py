"""Selection of the tokens of a BERT sample, computed from its number without a stored mapping, and their masking.

A split of T tokens has T // m samples per epoch, where m is the largest number of tokens in a sample. A keyed
permutation gives each sample a separate range of m tokens. The sample draws one token of its range, and starts with
the sentence that contains this token. Sentences after it, then before it, are added while the document has more and
the sample is too short. For any lengths of documents, all tokens of a split are equally likely to be drawn.

Words are masked in random order until the budget of the sample (`masking_budget`) is used up. Each word starts a range
of words of random length. The range is shortened to the remaining budget and to the end of its part of the sample. It
is skipped if it overlaps masked words (Megatron-LM's n-gram masking; lengths as in SpanBERT: Joshi et al. 2019, arXiv
1907.10529, section 3.1). 80% of the masked tokens become [MASK], 10% become a random token, and 10% stay unchanged
(Devlin et al. 2018, arXiv 1810.04805, section 3.1).
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from megapipe.config.bert import SPECIAL_TOKENS, BertDataConfig, masking_budget
from megapipe.config.files import DECODING_ERRORS, read_bytes, read_json
from megapipe.data import DataError
from megapipe.data.samples import SplitName, split_documents
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import kind_and_path
from megapipe.random.sampling import Draws, KeyedPermutation

VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
CONTINUATION = "##"
"""Prefix of pieces that continue a word (Wu et al. 2016, arXiv 1609.08144, in BERT's notation)."""
LARGEST_GAP = 1_000_000
"""Largest number of unused ids in a vocabulary, because memory is allocated for each of them."""
_SPECIAL = {"padding": "[PAD]", "classification": "[CLS]", "separator": "[SEP]", "mask": "[MASK]"}
_ROBERTAS = {"padding": "<pad>", "classification": "<s>", "separator": "</s>", "mask": "<mask>"}
_SPACES = ("\u0120", "\u010a", "\u0109", "\u2581")
"""Space, newline and tab at the start of byte-level pieces, and the space of SentencePiece: such a piece starts a
word, as in fairseq."""


@dataclass(frozen=True)
class BertVocabulary:
    """The properties of a WordPiece or byte-level vocabulary that samples use.

    size: larger than every id. padding, classification, separator, mask: ids of [PAD], [CLS], [SEP], [MASK], or of
    RoBERTa's <pad>, <s>, </s>, <mask>. continues: bool [size], true for pieces that continue a word.
    """

    size: int
    padding: int
    classification: int
    separator: int
    mask: int
    continues: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Hash of all properties. Vocabularies with the same hash mask the same tokens in the same way; their pieces
        may differ."""
        numbers = (self.size, self.padding, self.classification, self.separator, self.mask)
        content = f"{numbers}".encode() + self.continues.tobytes()
        return f"xxh128:{xxhash.xxh3_128_hexdigest(content)}"

    @classmethod
    def of(cls, ids: dict[str, int], source: str, starts: Callable[[str], bool]) -> "BertVocabulary":
        """Create a vocabulary from the ids of all pieces. starts: whether a piece starts a word.

        Raises DataError, with `source`, if a special token is missing.
        """
        special = _ROBERTAS if set(_ROBERTAS.values()) <= ids.keys() else _SPECIAL
        missing = [token for token in special.values() if token not in ids]
        if missing:
            raise DataError(
                f"{source} has no {', '.join(missing)}; BERT samples need {', '.join(special.values())}: train one "
                "with megapipe preprocess train-tokenizer --type wordpiece-uncased, or use the one of a published BERT"
            )
        size = max(ids.values()) + 1
        continues = np.zeros(size, dtype=bool)
        continues[[number for piece, number in ids.items() if not starts(piece)]] = True
        continues[[ids[token] for token in special.values()]] = False
        return cls(size, **{name: ids[token] for name, token in special.items()}, continues=continues)

    @classmethod
    def read(cls, path: str | Path) -> "BertVocabulary":
        """Read a vocab.txt (one piece per line), a tokenizer.json, or a folder with one of them. path: also with the
        kind before it that preprocessing accepts.

        Raises DataError for anything else, and for a vocabulary without the special tokens of BERT or RoBERTa.
        """
        _, file = kind_and_path(str(path))
        if file.is_dir():
            file = next(filter(Path.is_file, (file / TOKENIZER, file / VOCABULARY)), file)
        if not file.is_file():
            raise DataError(f"no vocabulary {str(path)!r}: give a {VOCABULARY}, a {TOKENIZER}, or a folder with one")
        if file.suffix == ".json":
            return cls._of_json(file)
        try:
            text = read_bytes(file, DataError).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is neither a {VOCABULARY} nor a {TOKENIZER}: it is not UTF-8 text") from error
        # Not splitlines, which also splits at U+0085 and U+2028.
        lines = text.removesuffix("\n").split("\n")
        ids = {line.rstrip(): number for number, line in enumerate(lines)}
        return cls.of(ids, str(file), lambda piece: not piece.startswith(CONTINUATION))

    @classmethod
    def _of_json(cls, file: Path) -> "BertVocabulary":
        content = read_json(file, DataError)
        try:
            model = content["model"]
            kind, vocabulary = model.get("type", "WordPiece"), model["vocab"]
            if isinstance(vocabulary, list):  # a list of (piece, score)
                vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
            ids = dict(vocabulary)
            added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
            # In other models, continuing_subword_prefix is null.
            of_pieces = kind == "WordPiece"
            continuation = model.get("continuing_subword_prefix", CONTINUATION) if of_pieces else CONTINUATION
            if not all(isinstance(text, str) for text in (continuation, *added)):
                raise ValueError("an added token or continuing_subword_prefix is not text")
            limit = 2 * (len(ids) + len(added)) + LARGEST_GAP
            if not all(type(number) is int and 0 <= number < limit for number in (ids | added).values()):
                raise ValueError(f"an id is not a whole number from 0 to {limit - 1}")
        except DECODING_ERRORS as error:
            raise DataError(f"{file} is not a {TOKENIZER} that can be read ({error!r})") from error
        if not of_pieces:
            return cls.of(ids | added, str(file), lambda piece: piece.startswith(_SPACES))
        return cls.of(ids | added, str(file), lambda piece: not piece.startswith(continuation))


MASKED, RANDOM = 0.8, 0.1
SPANBERT_PROBABILITY = 0.2


class Masked(NamedTuple):
    """A sample with masked tokens.

    tokens: int64 [n], the input of the model. positions: int64 [k], positions of the masked tokens, ascending. labels:
    int64 [k], the original tokens at these positions.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Masking:
    """The rule for masking tokens.

    lengths: float64 [max_ngram], cumulative probabilities of the number of words in a range. same_replacement: whether
    one random draw decides the replacement of all tokens of a range, instead of one draw for each token.
    """

    vocabulary: BertVocabulary
    probability: float
    whole_words: bool
    lengths: np.ndarray
    same_replacement: bool

    @classmethod
    def of(cls, data: BertDataConfig, vocabulary: BertVocabulary) -> "Masking":
        """Return the rule that a configuration describes."""
        numbers = np.arange(1, data.max_ngram + 1)
        geometric = data.ngram_lengths == "geometric"
        weights = (1 - SPANBERT_PROBABILITY) ** (numbers - 1) if geometric else 1 / numbers
        lengths = np.cumsum(weights) / weights.sum()
        return cls(vocabulary, data.mask_probability, data.whole_words, lengths, same_replacement=geometric)

    def apply(self, tokens: np.ndarray, parts: np.ndarray, draws: Draws) -> Masked:
        """Mask tokens of one sample.

        tokens: int64 [n], without padding. parts: int64 [n], the number of each token's part; -1 for special tokens.
        """
        starts, ends, limits = self._words(tokens, parts)
        runs = self._runs(starts, ends, limits, masking_budget(self.probability, len(tokens)), draws)
        positions = np.array(sorted(place for begin, end in runs for place in range(begin, end)), dtype=np.int64)
        labels = tokens[positions]
        fractions = draws.fractions(len(positions))
        if self.same_replacement:
            fractions = _first_of_each_run(fractions, positions, runs)
        random_tokens = (draws.fractions(len(positions)) * self.vocabulary.size).astype(np.int64)
        inputs = tokens.copy()
        inputs[positions] = np.where(
            fractions < MASKED, self.vocabulary.mask, np.where(fractions < MASKED + RANDOM, random_tokens, labels)
        )
        return Masked(inputs, positions, labels)

    def _words(self, tokens: np.ndarray, parts: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Return for each word its first token, its end, and the number of words from it to the end of its part."""
        opens = np.ones(len(tokens), dtype=bool)
        if self.whole_words:
            opens[1:] = ~self.vocabulary.continues[tokens[1:]] | (parts[1:] != parts[:-1])
        starts = np.flatnonzero(opens)
        ends = np.append(starts[1:], len(tokens))
        ordinary = parts[starts] >= 0
        starts, ends = starts[ordinary], ends[ordinary]
        # The words of a part are consecutive, so the part's last word is found by the number of the part.
        last = np.searchsorted(parts[starts], parts[starts], side="right")
        return starts.tolist(), ends.tolist(), (last - np.arange(len(starts))).tolist()

    def _runs(
        self, starts: list[int], ends: list[int], limits: list[int], budget: int, draws: Draws
    ) -> list[tuple[int, int]]:
        """Return the ranges of tokens to mask, each [begin, end).

        starts, ends, limits: see `_words`. budget: largest number of tokens to mask.
        """
        masked = [False] * len(starts)
        numbers = np.searchsorted(self.lengths, draws.fractions(len(starts)), side="right") + 1
        runs: list[tuple[int, int]] = []
        for word, number in zip(draws.order(len(starts)).tolist(), numbers.tolist(), strict=True):
            if budget == 0:
                break
            count = min(number, limits[word])
            while count and ends[word + count - 1] - starts[word] > budget:
                count -= 1
            if count and not any(masked[word : word + count]):
                masked[word : word + count] = [True] * count
                runs.append((starts[word], ends[word + count - 1]))
                budget -= runs[-1][1] - runs[-1][0]
        return runs


def _first_of_each_run(values: np.ndarray, positions: np.ndarray, runs: list[tuple[int, int]]) -> np.ndarray:
    """Replace the value at each position by the value at the first position of its range."""
    starts = np.array(sorted(begin for begin, _ in runs), dtype=np.int64)
    run_starts = starts[np.searchsorted(starts, positions, side="right") - 1]
    return values[np.searchsorted(positions, run_starts)]


LONGEST_SEARCH = 10_000
"""Largest number of documents to search for a document with two sentences."""


class Parts(NamedTuple):
    """The two parts of a sample as ranges [begin, end) of tokens of the .bin; without pairs, the second is empty.

    label: 1 if the parts are not in their original order. real: false for a sample after the end of a sequential
    order.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    label: int
    real: bool = True

    @property
    def num_tokens(self) -> int:
        """Number of tokens of both parts, without special tokens."""
        return self.first[1] - self.first[0] + self.second[1] - self.second[0]


NO_PARTS = Parts((0, 0), (0, 0), 0, real=False)


class SentencePairs:
    """Selects the parts of every sample of one split of a shard. Reads only the .idx file. Thread-safe.

    data: pairs, proportions of the splits, sequence length and probability of short samples. shuffle: if true, the
    ranges of an epoch are in random order and epochs repeat without end; otherwise they are in text order, once.

    Raises DataError for a split that is too small for one sample, and for a shard without sentences if pairs need
    them.
    """

    def __init__(
        self,
        shard: IndexedDataset,
        data: BertDataConfig,
        *,
        split: SplitName,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._shard = shard
        self._pairs = data.pairs
        self._short_probability = data.short_sequence_probability
        self._seed = seed
        self._shuffle = shuffle
        self.num_special = SPECIAL_TOKENS if data.pairs != "none" else SPECIAL_TOKENS - 1
        self.max_tokens = data.sequence_length - self.num_special
        """Largest number of tokens of a sample, without special tokens."""
        self._documents = split_documents(shard.num_documents, data.split)[split]
        self._begin = shard.document_start(self._documents.start)
        self._num_samples = (shard.document_start(self._documents.stop) - self._begin) // self.max_tokens
        self._purpose = f"bert parts of {split}"
        self._check(split, data.split)
        self._order = lru_cache(maxsize=2)(partial(KeyedPermutation, self._num_samples, seed))

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self._num_samples

    def parts(self, ordinal: int) -> Parts:
        """Return the parts of the sample with this number in the order of the run. Raises DataError if no pair can be
        formed."""
        epoch, position = divmod(ordinal, self._num_samples)
        if not self._shuffle and epoch:
            return NO_PARTS
        draws = Draws(self._seed, self._purpose, ordinal)
        range_number = self._order(epoch)[position] if self._shuffle else position
        seed_token = self._begin + range_number * self.max_tokens + draws.below(self.max_tokens)
        document, sentence = self._seed_sentence(seed_token)
        target = self.max_tokens
        if draws.chance(self._short_probability):
            target = 2 + draws.below(self.max_tokens - 1)
        if self._pairs == "none":
            part = self._tokens(*self._grow(document, sentence, target, at_least=1))
            return Parts(_cut(part, self.max_tokens, draws), (0, 0), 0)
        return self._pair(document, sentence, target, draws)

    def _pair(self, document: int, sentence: int, target: int, draws: Draws) -> Parts:
        begin, end = self._grow(document, sentence, target, at_least=2)
        pivot = begin + 1 + draws.below(end - begin - 1)
        first, second = self._tokens(begin, pivot), self._tokens(pivot, end)
        changed = draws.chance(0.5)
        if changed and self._pairs == "order":
            first, second = second, first
        elif changed:
            second = self._random_range(document, target - (first[1] - first[0]), draws)
        return Parts(*_cut_pair(first, second, self.max_tokens, draws), int(changed))

    def _seed_sentence(self, token: int) -> tuple[int, int]:
        """Return (document, sentence) of a token. If pairs need two sentences and the document has one, return the
        first sentence of a later document."""
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

    def _grow(self, document: int, sentence: int, target: int, at_least: int) -> tuple[int, int]:
        """Return sentences [begin, end) of the document around `sentence`, with at least `target` tokens if
        possible."""
        first, last = self._shard.document_indices[document : document + 2].tolist()
        lengths = self._shard.sequence_lengths
        begin, end, num_tokens = sentence, sentence + 1, int(lengths[sentence])
        while (num_tokens < target or end - begin < at_least) and end < last:
            num_tokens += int(lengths[end])
            end += 1
        while (num_tokens < target or end - begin < at_least) and begin > first:
            begin -= 1
            num_tokens += int(lengths[begin])
        return begin, end

    def _random_range(self, document: int, target: int, draws: Draws) -> tuple[int, int]:
        """Return the range of tokens around a random sentence of another document of the split."""
        for _ in range(LONGEST_SEARCH):
            other = self._documents[draws.below(len(self._documents))]
            if other != document and self._num_sentences(other):
                sentence = int(self._shard.document_indices[other]) + draws.below(self._num_sentences(other))
                return self._tokens(*self._grow(other, sentence, target, at_least=1))
        raise DataError(
            f"{self._shard.prefix}: data.pairs next needs sentences of other documents, but {LONGEST_SEARCH:,} random "
            f"documents were empty or document {document} itself; set data.pairs order, or add documents"
        )

    def _num_sentences(self, document: int) -> int:
        first, last = self._shard.document_indices[document : document + 2].tolist()
        return int(last - first)

    def _tokens(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of tokens of sentences [begin, end), which a shard stores consecutively."""
        return self._shard.sequence_start(begin), self._shard.sequence_start(end)

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
        if self._pairs == "next" and len(self._documents) < 2:
            raise DataError(
                f"the {split} split has one document, but data.pairs next needs sentences of "
                "other documents; set data.pairs order, or add documents"
            )


def _cut(part: tuple[int, int], length: int, draws: Draws) -> tuple[int, int]:
    """Shorten a part to `length`. A random draw decides for each token whether it is removed at the front or back."""
    excess = part[1] - part[0] - length
    if excess <= 0:
        return part
    front = draws.heads(excess)
    return part[0] + front, part[1] - (excess - front)


def _cut_pair(
    first: tuple[int, int], second: tuple[int, int], length: int, draws: Draws
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shorten the parts to `length` in total by removing tokens of the longer part (the second if they are equal)."""
    one, two = first[1] - first[0], second[1] - second[0]
    one = min(one, max(length - two, (length + 1) // 2))
    two = min(two, length - one)
    return _cut(first, one, draws), _cut(second, two, draws)
