"""From a configuration to samples: blends, what cannot be blended, and the losses to beat, counted by hand."""

import math
import os
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.bert import SPECIAL_TOKENS
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.data.bert_samples import BertSamples
from megapipe.data.manifest import manifest_path
from megapipe.data.samples import GptSamples
from megapipe.training.loop import batches
from megapipe.training.loop.batches import reference_losses, split_samples
from tests.data.shards import numbered_documents, shard_manifest, write_shard
from tests.support import gpt_runs
from tests.support.bert_runs import write_corpus
from tests.support.gpt_runs import VOCABULARY


def make(blend: dict[str, float], split: str = "8,2") -> PretrainConfig:
    config = PretrainConfig(model=ModelConfig(vocabulary_size=4000))
    return replace(config, data=replace(config.data, blend=blend, sequence_length=4, split=split))


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Two of ten documents each."""
    return [str(write_shard(tmp_path / f"c{first}", numbered_documents([9] * 10, first))) for first in (0, 1000)]


def write_manifest(prefix: str, fingerprint: str, vocabulary_size: int = 4000) -> None:
    changes = {"tokenizer_fingerprint": fingerprint, "vocabulary_size": vocabulary_size}
    manifest = shard_manifest(**changes, num_documents=10, num_tokens=90)
    manifest_path(prefix).write_text(manifest.to_json())


def test_splits_of_a_blend(corpora: list[str]) -> None:
    config = make(dict(zip(corpora, [3.0, 1.0], strict=True)))
    for split, documents in (("train", range(72)), ("validation", range(72, 90))):
        tokens = split_samples(config, split).tokens(np.arange(4))  # type: ignore[arg-type]
        assert sorted(tokens[:, 0] // 1000) == [0, 0, 0, 1]
        assert set((tokens % 1000).ravel().tolist()) <= set(documents)


def test_an_unknown_corpus_is_named_with_its_neighbours(corpora: list[str]) -> None:
    with pytest.raises(DataError, match=r"c7\.idx does not exist.*contains c0, c1000"):
        split_samples(make({corpora[0]: 1.0, corpora[0].replace("c0", "c7"): 1.0}), "train")


def test_corpora_that_do_not_fit_are_refused(corpora: list[str]) -> None:
    config = make(dict.fromkeys(corpora, 1.0))
    write_manifest(corpora[0], "sha256:" + "b" * 20)
    write_manifest(corpora[1], "sha256:" + "a" * 20)
    with pytest.raises(DataError, match=r"tokenized with bytes .*not with"):
        split_samples(config, "train")
    manifest_path(corpora[0]).unlink()
    write_manifest(corpora[1], "sha256:" + "a" * 20, vocabulary_size=5000)
    with pytest.raises(DataError, match="5000 ids, but the model's vocabulary_size is 4000"):
        split_samples(config, "train")


def test_more_corpora_than_open_files_are_refused(corpora: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/dev/null", os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 2, hard))
    try:
        with pytest.raises(DataError, match=r"c\d+ cannot be opened: .*ulimit -n"):
            split_samples(make(dict.fromkeys(corpora, 1.0)), "train")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_samples_longer_than_a_corpus_are_refused(corpora: list[str]) -> None:
    config = make(dict.fromkeys(corpora, 1.0), split="99,1")
    assert len(split_samples(config, "train")) > 0
    with pytest.raises(DataError, match=r"the validation split of .*c0 has 0 of 10 documents"):
        split_samples(config, "validation")


@pytest.fixture
def samples(tmp_path: Path) -> GptSamples:
    return GptSamples(gpt_runs.write_shard(tmp_path), split="train", shares="90,5,5", sequence_length=16, seed=3)


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
