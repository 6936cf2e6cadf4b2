"""The losses that a model has to beat, against counting by hand."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.bert import SPECIAL_TOKENS
from megapipe.data.bert_samples import BertSamples
from megapipe.data.samples import GptSamples
from megapipe.training.loop import batches
from megapipe.training.loop.batches import reference_losses
from tests.support.bert_runs import write_corpus
from tests.support.gpt_runs import VOCABULARY, write_shard


@pytest.fixture
def samples(tmp_path: Path) -> GptSamples:
    return GptSamples(write_shard(tmp_path), split="train", shares="90,5,5", sequence_length=16, seed=3)


def entropy(tokens: list[int]) -> float:
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in Counter(tokens).values())


def test_a_small_split_is_counted_whole(samples: GptSamples) -> None:
    losses = reference_losses(samples, VOCABULARY)
    labels = [int(token) for ordinal in range(len(samples)) for token in samples.tokens(ordinal)[1:]]
    assert losses.num_tokens == len(labels) == 16 * len(samples)
    assert losses.unigram == pytest.approx(entropy(labels), rel=1e-12)
    assert losses.uniform == math.log(VOCABULARY)
    assert losses.unigram < losses.uniform


def test_of_a_large_one_a_bounded_part(samples: GptSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAXIMUM_TOKENS", 100)
    monkeypatch.setattr(batches, "BLOCK", 4)
    losses = reference_losses(samples, VOCABULARY)
    labels = [int(token) for ordinal in range(6) for token in samples.tokens(ordinal)[1:]]
    assert losses.num_tokens == 96
    assert losses.unigram == pytest.approx(entropy(labels), rel=1e-12)


def test_references_of_a_bert_count_all_tokens(tmp_path: Path) -> None:
    """Any token may be hidden, and each as likely as another: all of them are counted, not the hidden ones alone."""
    data = replace(write_corpus(tmp_path, documents=3000), whole_words=False, max_ngram=1, mask_probability=0.5)
    samples = BertSamples(data, split="train", seed=3, vocabulary_size=VOCABULARY)
    losses = reference_losses(samples, VOCABULARY)
    batch = samples.batch(range(len(samples)))
    hidden = batch.labels[batch.loss_mask > 0]
    assert losses.num_tokens == (batch.lengths - SPECIAL_TOKENS).sum() > len(hidden)
    # A small sample's entropy is too small by this much (Miller, 1955); the rest is chance.
    bias = (VOCABULARY - 1) / 2 * (1 / len(hidden) - 1 / losses.num_tokens)
    assert losses.unigram == pytest.approx(entropy(hidden.tolist()) + bias, abs=0.01)
    assert losses.pairs == math.log(2)
