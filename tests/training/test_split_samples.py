"""From a configuration to samples: blends, and what cannot be blended."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.data.manifest import manifest_path
from megapipe.training.loop.batches import split_samples
from tests.data.shards import numbered_documents, shard_manifest, write_shard


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


def test_corpora_of_different_tokenizers_are_refused(corpora: list[str]) -> None:
    for prefix, fingerprint in zip(corpora, ["sha256:" + "a" * 20, "sha256:" + "b" * 20], strict=True):
        write_manifest(prefix, fingerprint)
    with pytest.raises(DataError, match=r"tokenized with bytes .*not with"):
        split_samples(make(dict.fromkeys(corpora, 1.0)), "train")


def test_a_corpus_beyond_the_models_vocabulary_is_refused(corpora: list[str]) -> None:
    write_manifest(corpora[1], "sha256:" + "a" * 20, vocabulary_size=5000)
    with pytest.raises(DataError, match="5000 ids, but the model's vocabulary_size is 4000"):
        split_samples(make(dict.fromkeys(corpora, 1.0)), "train")


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
