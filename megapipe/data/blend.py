"""Samples of several corpora in given proportions."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megapipe.data.sample_set import SampleSet


class CorpusOrder(Protocol):
    """Which corpus each sample of a blend comes from."""

    def assign(self, ordinals: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Corpus of each sample, and the sample's ordinal within that corpus: int64 of the shape of `ordinals`."""
        ...

    def ordinal_of(self, corpus: int, sample: int) -> int:
        """The place in the blend of a corpus's sample, both counted from 0."""
        ...


class BlendedSamples:
    """Sample o of the blend is the next sample of the corpus that `order` gives o to.

    Every corpus goes through its own epochs. repeats: whether corpora begin again; if not, what lies behind the first
    corpus's end is empty samples, so that the proportions hold for all that is read (evaluation).
    """

    def __init__(self, corpora: Sequence[SampleSet], order: CorpusOrder, *, repeats: bool) -> None:
        self.corpora = tuple(corpora)
        self.sequence_length = corpora[0].sequence_length
        self._order = order
        self._repeats = repeats
        self._num_samples = min(order.ordinal_of(index, len(corpus)) for index, corpus in enumerate(corpora))

    def __len__(self) -> int:
        """Samples until the first corpus is used up."""
        return self._num_samples

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it."""
        counts = np.zeros(np.shape(ordinals), dtype=np.int64)
        for corpus, chosen, within in self._shares(ordinals):
            counts.reshape(-1)[chosen] = corpus.num_labels(within)
        return counts

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """As `SampleSet` has it. Raises DataError for an id outside the vocabulary."""
        tokens = np.zeros((*np.shape(ordinals), self.sequence_length + 1), dtype=np.int64)
        for corpus, chosen, within in self._shares(ordinals):
            tokens.reshape(-1, self.sequence_length + 1)[chosen] = corpus.tokens(within)
        return tokens

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """As `SampleSet` has it."""
        found = [np.empty(0, dtype=np.int64)] * np.size(ordinals)
        for corpus, chosen, within in self._shares(ordinals):
            for place, boundaries in zip(chosen, corpus.boundaries(within), strict=True):
                found[place] = boundaries
        return found

    def _shares(self, ordinals: npt.ArrayLike) -> Iterator[tuple[SampleSet, np.ndarray, np.ndarray]]:
        """For each corpus that is asked: itself, places in the flat `ordinals`, and its own ordinals for them."""
        flat = np.asarray(ordinals, dtype=np.int64).reshape(-1)
        known = np.arange(len(flat)) if self._repeats else np.flatnonzero(flat < len(self))
        corpora, within = self._order.assign(flat[known])
        for index in np.unique(corpora):
            here = corpora == index
            yield self.corpora[index], known[here], within[here]
