"""Reference losses of models that have learned nothing: uniform guesses, and guesses by token frequency."""

import math
from dataclasses import dataclass

import numpy as np

from megapipe.training.sources import AnyBertSamples, Samples

MAXIMUM_TOKENS = 2**20
"""Maximum number of tokens to count, which takes about a second."""

BLOCK = 256
"""Samples read at a time."""


@dataclass(frozen=True)
class References:
    """Losses in nats per token. uniform: ln(vocabulary). unigram: entropy of the training split's token frequencies.

    num_tokens: tokens counted for `unigram`. pairs: ln 2 where the loss has a second term, for pairs of sentences,
    else 0.
    """

    uniform: float
    unigram: float
    num_tokens: int
    pairs: float = 0.0

    def __str__(self) -> str:
        pairs = f"; of sentence pairs {self.pairs:.3f}" if self.pairs else ""
        return (
            f"ln(vocabulary) {self.uniform:.3f}, unigram entropy {self.unigram:.3f} "
            f"({self.num_tokens:,} training tokens){pairs}"
        )


def reference_losses(samples: Samples, vocabulary_size: int) -> References:
    """Return reference losses from the labels of the run's first samples, a random part of the split, or all of a
    small split; for BERT from all tokens, since any may be hidden.

    The entropy of the counts is below that of the split by about (distinct ids - 1) / (2 num_tokens) (Miller, 1955).
    """
    num_samples = max(1, min(len(samples), MAXIMUM_TOKENS // samples.sequence_length))
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for first in range(0, num_samples, BLOCK):
        ordinals = np.arange(first, min(first + BLOCK, num_samples))
        counts += np.bincount(_labels(samples, ordinals), minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    pairs = math.log(2) if isinstance(samples, AnyBertSamples) and samples.has_pairs else 0.0
    return References(math.log(vocabulary_size), float(-(shares * np.log(shares)).sum()), int(counts.sum()), pairs)


def _labels(samples: Samples, ordinals: np.ndarray) -> np.ndarray:
    if isinstance(samples, AnyBertSamples):
        return samples.text(ordinals)
    labels = samples.tokens(ordinals)[:, 1:]
    return labels[np.arange(samples.sequence_length) < samples.num_labels(ordinals)[:, None]]
