"""What a loss is to be compared with before anything was learnt: uniform guessing, and guessing by frequency."""

import math
from dataclasses import dataclass

import numpy as np

from megapipe.data.sample_set import SampleSet

MAXIMUM_TOKENS = 2**20
"""Tokens that are counted at most: a second's reading, wherever the corpus lies."""

BLOCK = 256
"""Samples that are read at a time."""


@dataclass(frozen=True)
class References:
    """Losses in nats per token. uniform: ln(vocabulary). unigram: entropy of the training split's token frequencies.

    num_tokens: tokens that were counted for `unigram`.
    """

    uniform: float
    unigram: float
    num_tokens: int


def reference_losses(samples: SampleSet, vocabulary_size: int) -> References:
    """Count the labels of the first samples of the run, a random part of the split, or all of a small one.

    The entropy of the counts is below that of the split by about (distinct ids - 1) / (2 num_tokens) (Miller, 1955).
    """
    num_samples = max(1, min(len(samples), MAXIMUM_TOKENS // samples.sequence_length))
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for first in range(0, num_samples, BLOCK):
        ordinals = np.arange(first, min(first + BLOCK, num_samples))
        labels = samples.tokens(ordinals)[:, 1:]
        real = np.arange(samples.sequence_length) < samples.num_labels(ordinals)[:, None]
        counts += np.bincount(labels[real], minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return References(math.log(vocabulary_size), float(-(shares * np.log(shares)).sum()), int(counts.sum()))
