"""The losses that a model has to beat, against counting by hand."""

import math
from collections import Counter
from pathlib import Path

import pytest

from megapipe.data.samples import GptSamples
from megapipe.training import references
from megapipe.training.references import reference_losses
from tests.support.gpt_runs import VOCABULARY, write_shard


@pytest.fixture
def samples(tmp_path: Path) -> GptSamples:
    return GptSamples(write_shard(tmp_path), split="train", shares="90,5,5", sequence_length=16, seed=3)


def entropy(tokens: list[int]) -> float:
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in Counter(tokens).values())


def test_a_small_split_is_counted_whole(samples: GptSamples) -> None:
    found = reference_losses(samples, VOCABULARY)
    labels = [int(token) for ordinal in range(len(samples)) for token in samples.tokens(ordinal)[1:]]
    assert found.num_tokens == len(labels) == 16 * len(samples)
    assert found.unigram == pytest.approx(entropy(labels), rel=1e-12)
    assert found.uniform == math.log(VOCABULARY)
    assert found.unigram < found.uniform


def test_of_a_large_one_a_bounded_part(samples: GptSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAXIMUM_TOKENS", 100)
    monkeypatch.setattr(references, "BLOCK", 4)
    found = reference_losses(samples, VOCABULARY)
    labels = [int(token) for ordinal in range(6) for token in samples.tokens(ordinal)[1:]]
    assert found.num_tokens == 96
    assert found.unigram == pytest.approx(entropy(labels), rel=1e-12)
