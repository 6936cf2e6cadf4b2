"""Which tokens of a BERT sample are hidden, and what stands in their place.

Words are tried in random order until the budget is used up. Each opens a run of words of random length, shortened to
what is left of the budget and of its part of the sample, and passed over where it meets hidden words (Megatron-LM's
n-gram masking; run lengths as in SpanBERT: Joshi et al. 2019, arXiv 1907.10529, section 3.1). Of the hidden tokens 80%
become [MASK], 10% a random token, 10% stay (Devlin et al. 2018, arXiv 1810.04805, section 3.1).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megapipe.config.bert import BertDataConfig, masking_budget
from megapipe.data.bert_vocabulary import BertVocabulary
from megapipe.random.draws import Draws

MASKED, RANDOM = 0.8, 0.1
SPANBERT_PROBABILITY = 0.2


class Masked(NamedTuple):
    """tokens: int64 [n], what the model sees. positions: int64 [k], places of the hidden ones, ascending.
    labels: int64 [k], what stood there."""

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden. lengths: float64 [max_ngram], cumulative probabilities of a run's number of words.

    alike: the tokens of a run are replaced alike, instead of each by itself.
    """

    vocabulary: BertVocabulary
    probability: float
    whole_words: bool
    lengths: np.ndarray
    alike: bool

    @classmethod
    def of(cls, data: BertDataConfig, vocabulary: BertVocabulary) -> "Masking":
        """As configured."""
        numbers = np.arange(1, data.max_ngram + 1)
        geometric = data.ngram_lengths == "geometric"
        weights = (1 - SPANBERT_PROBABILITY) ** (numbers - 1) if geometric else 1 / numbers
        lengths = np.cumsum(weights) / weights.sum()
        return cls(vocabulary, data.mask_probability, data.whole_words, lengths, alike=geometric)

    def apply(self, tokens: np.ndarray, parts: np.ndarray, draws: Draws) -> Masked:
        """Hide tokens of one sample.

        tokens: int64 [n], padding left out. parts: int64 [n], a number for each part and -1 for special tokens.
        """
        starts, ends, limits = self._words(tokens, parts)
        runs = self._runs(starts, ends, limits, masking_budget(self.probability, len(tokens)), draws)
        positions = np.array(sorted(place for begin, end in runs for place in range(begin, end)), dtype=np.int64)
        labels = tokens[positions]
        fates = draws.fractions(len(positions))
        if self.alike:
            fates = _first_of_each_run(fates, positions, runs)
        strangers = (draws.fractions(len(positions)) * self.vocabulary.size).astype(np.int64)
        seen = tokens.copy()
        seen[positions] = np.where(
            fates < MASKED, self.vocabulary.mask, np.where(fates < MASKED + RANDOM, strangers, labels)
        )
        return Masked(seen, positions, labels)

    def _words(self, tokens: np.ndarray, parts: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """First token and end of each word, and how many words its part has from it on."""
        opens = np.ones(len(tokens), dtype=bool)
        if self.whole_words:
            opens[1:] = ~self.vocabulary.continues[tokens[1:]] | (parts[1:] != parts[:-1])
        starts = np.flatnonzero(opens)
        ends = np.append(starts[1:], len(tokens))
        ordinary = parts[starts] >= 0
        starts, ends = starts[ordinary], ends[ordinary]
        # The words of a part stand in a row, so the part's last word is found by its number.
        last = np.searchsorted(parts[starts], parts[starts], side="right")
        return starts.tolist(), ends.tolist(), (last - np.arange(len(starts))).tolist()

    def _runs(
        self, starts: list[int], ends: list[int], limits: list[int], budget: int, draws: Draws
    ) -> list[tuple[int, int]]:
        """Hidden runs of tokens as [begin, end)."""
        hidden = [False] * len(starts)
        wanted = np.searchsorted(self.lengths, draws.fractions(len(starts)), side="right") + 1
        runs: list[tuple[int, int]] = []
        for word, number in zip(draws.order(len(starts)).tolist(), wanted.tolist(), strict=True):
            if budget == 0:
                break
            count = min(number, limits[word])
            while count and ends[word + count - 1] - starts[word] > budget:
                count -= 1
            if count and not any(hidden[word : word + count]):
                hidden[word : word + count] = [True] * count
                runs.append((starts[word], ends[word + count - 1]))
                budget -= runs[-1][1] - runs[-1][0]
        return runs


def _first_of_each_run(values: np.ndarray, positions: np.ndarray, runs: list[tuple[int, int]]) -> np.ndarray:
    begins = np.array(sorted(begin for begin, _ in runs), dtype=np.int64)
    of_run = begins[np.searchsorted(begins, positions, side="right") - 1]
    return values[np.searchsorted(positions, of_run)]
