"""Blends of BERT corpora: each sample is a corpus's own, in the order that GPT's blends have."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.data.bert_blend import BlendedBertSamples, open_bert_samples
from megapipe.data.bert_samples import BertBatch
from megapipe.data.bert_vocabulary import BertVocabulary
from megapipe.data.blend_order import BlendOrder
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import ShardManifest, manifest_path
from tests.data.bert_shards import random_documents, write_sentences

SIZE = 90
WEIGHTS = [2.0, 0.5]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[BertDataConfig]:
    """Of different lengths."""
    found = []
    for seed, documents in ((1, 20), (2, 70)):
        content = random_documents(np.random.default_rng(seed), documents, SIZE)
        folder = tmp_path_factory.mktemp(f"corpus{seed}")
        found.append(write_sentences(folder, content, SIZE, sequence_length=24))
    return found


def opened(data: BertDataConfig, **changes: object) -> BlendedBertSamples:
    how = {"split": "train", "seed": 5, "vocabulary_size": SIZE}
    found = open_bert_samples(data, **{**how, **changes})  # type: ignore[arg-type]
    assert isinstance(found, BlendedBertSamples)
    return found


def blended(corpora: Sequence[BertDataConfig]) -> BertDataConfig:
    weights = {data.prefix: weight for data, weight in zip(corpora, WEIGHTS, strict=True)}
    return replace(corpora[0], prefix="", blend=weights)


def rows_of(batch: BertBatch) -> list[tuple[bytes, ...]]:
    return [tuple(field[row].tobytes() for field in batch) for row in range(len(batch.lengths))]


@pytest.mark.parametrize("pairs", ["order", "none"])
def test_every_sample_is_the_next_of_its_corpus_epoch_after_epoch(corpora: list[BertDataConfig], pairs: str) -> None:
    data = replace(blended(corpora), pairs=pairs)
    samples = opened(data)
    single = [open_bert_samples(replace(data, prefix=prefix, blend={}), split="train", seed=5, vocabulary_size=SIZE)
              for prefix in data.prefixes]  # fmt: skip
    count = 2 * len(samples)
    numbers, within = BlendOrder(WEIGHTS).assign(np.arange(count))
    expected = [rows_of(single[which].batch([each]))[0] for which, each in zip(numbers, within, strict=True)]
    assert rows_of(samples.batch(range(count))) == expected
    some = np.random.default_rng(0).permutation(count)[:17]
    assert rows_of(samples.batch(some)) == [expected[each] for each in some]
    assert np.array_equal(samples.lengths(some), samples.batch(some).lengths)
    assert np.bincount(numbers).tolist() == pytest.approx([0.8 * count, 0.2 * count], abs=1)
    assert len(np.unique(numbers)) == 2
    assert sorted(samples.text(some)) == sorted(
        np.concatenate([single[numbers[each]].text([within[each]]) for each in some])
    )


def test_a_blend_that_does_not_repeat_ends_with_its_first_corpus(corpora: list[BertDataConfig]) -> None:
    samples = opened(blended(corpora), shuffle=False)
    ends = [BlendOrder(WEIGHTS).ordinal_of(index, len(corpus)) for index, corpus in enumerate(samples.corpora)]
    assert len(samples) == min(ends) < max(ends)
    batch = samples.batch([len(samples) - 1, len(samples), 10 * len(samples)])
    assert batch.sentence_weights.tolist() == [1.0, 0.0, 0.0]
    assert batch.loss_mask[0].sum() > 0
    assert not batch.loss_mask[1:].any()
    assert np.array_equal(samples.lengths([len(samples) - 1, len(samples), 10 * len(samples)]), batch.lengths)


def test_one_shard_needs_no_blend(corpora: list[BertDataConfig]) -> None:
    found = open_bert_samples(corpora[0], split="train", seed=5, vocabulary_size=SIZE)
    assert not isinstance(found, BlendedBertSamples)


def test_shards_of_different_vocabularies_are_refused(tmp_path: Path) -> None:
    corpora = []
    for size in (SIZE, SIZE - 10):
        folder = tmp_path / str(size)
        folder.mkdir()
        content = random_documents(np.random.default_rng(size), 20, SIZE - 10)
        corpora.append(write_sentences(folder, content, size, sequence_length=24))
        name_tokenizer(corpora[-1])
    with pytest.raises(DataError, match="different vocabularies"):
        opened(replace(blended(corpora), tokenizer=""))


def name_tokenizer(data: BertDataConfig) -> None:
    """A manifest beside the shard; every shard's hash is the same, so that only the vocabularies tell them apart."""
    shard = IndexedDataset(data.prefix)
    manifest = ShardManifest(
        tokenizer=data.tokenizer,
        tokenizer_fingerprint="sha256:0",
        vocabulary_size=BertVocabulary.read(data.tokenizer).size,
        end_of_document=None,
        end_of_document_appended=False,
        dtype=str(shard.dtype),
        num_documents=shard.num_documents,
        num_tokens=len(shard.tokens),
    )
    manifest_path(data.prefix).write_text(manifest.to_json())
