"""Blends keep their proportions at every prefix, hand out every sample once, and go on from anywhere."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.bert import BertDataConfig
from megapipe.data import DataError
from megapipe.data.bert_samples import BertBatch, BlendedBertSamples, open_bert_samples
from megapipe.data.manifest import manifest_path
from megapipe.data.mixing import (
    LONGEST_PERIOD,
    BlendedSamples,
    BlendOrder,
    FillInTheMiddle,
    FillInTheMiddleRule,
    weights_are_rounded,
    whole_parts,
)
from megapipe.data.samples import GptSamples
from megapipe.data.shards import IndexedDataset
from tests.data.bert_shards import random_documents, write_sentences
from tests.data.shards import numbered_documents, shard_manifest, write_shard

weights_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def largest_deviation(order: BlendOrder) -> Fraction:
    """Over every corpus and every prefix of a period, counted one by one, exactly."""
    corpora, _ = order.assign(np.arange(order.period))
    prefixes = np.arange(1, order.period + 1)
    worst = 0
    for corpus, parts in enumerate(order.parts):
        counts = np.cumsum(corpora == corpus)
        assert counts[-1] == parts
        worst = max(worst, int(np.abs(counts * order.period - prefixes * parts).max()))
    return Fraction(worst, order.period)


@settings(max_examples=150, deadline=None)
@given(weights=weights_strategy)
def test_every_prefix_deviates_by_less_than_one_sample(weights: list[int]) -> None:
    order = BlendOrder(weights)
    assert largest_deviation(order) < 1
    assert [Fraction(part, order.period) for part in order.parts] == [Fraction(w, sum(weights)) for w in weights]


@settings(max_examples=60, deadline=None)
@given(weights=weights_strategy, start=st.integers(0, 2**50))
def test_every_corpus_counts_up_by_one_from_anywhere(weights: list[int], start: int) -> None:
    order = BlendOrder(weights)
    corpora, within = order.assign(np.arange(start, start + 300))
    periods, rest = divmod(start, order.period)
    in_rest = np.bincount(order.assign(np.arange(rest))[0], minlength=len(weights)).tolist()
    passed = Counter({corpus: periods * order.parts[corpus] + count for corpus, count in enumerate(in_rest)})
    for offset, (corpus, sample) in enumerate(zip(corpora.tolist(), within.tolist(), strict=True)):
        assert sample == passed[corpus]
        assert order.ordinal_of(corpus, sample) == start + offset
        passed[corpus] += 1


def test_weights_are_read_as_decimals() -> None:
    large = [1, 2**20 + 1]
    for weights, parts in (([0.1, 0.2, 0.7], (1, 2, 7)), ([3, 3], (1, 1)), ([2.5, 7.5e2], (1, 300))):
        assert whole_parts(weights) == parts
        assert not weights_are_rounded(weights)
    assert whole_parts(large) == (1, 2**20 - 1)
    assert weights_are_rounded(large)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-12, 1e12), min_size=2, max_size=40))
def test_large_ratios_are_rounded_to_parts(weights: list[float]) -> None:
    parts = whole_parts(weights)
    assert sum(parts) <= LONGEST_PERIOD
    assert min(parts) >= 1
    total = sum(map(Fraction, weights))
    for part, weight in zip(parts, weights, strict=True):
        # Those that were lifted to 1 part take one from the largest each.
        assert abs(Fraction(part, sum(parts)) - Fraction(weight) / total) <= Fraction(len(weights), LONGEST_PERIOD)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(DataError, match=f"weight 1 of the blend is {weight}"):
        BlendOrder([1.0, weight])
    with pytest.raises(DataError, match="has 0 corpora"):
        BlendOrder([])


def test_an_unrepeated_blend_ends_with_its_first_corpus(tmp_path: Path) -> None:
    """The first corpus has 10 tokens in samples of 4, 4 and 1 labels; token k of corpus c is 1000 c + k."""
    corpora = []
    for index, size in enumerate((10, 100)):
        prefix = write_shard(tmp_path / f"corpus{index}", numbered_documents([size], 1000 * index))
        corpora.append(GptSamples(prefix, split="train", shares="1", sequence_length=4, seed=7, shuffle=False))
    blend = BlendedSamples(corpora, BlendOrder([1, 1]), repeats=False)
    assert len(blend) in (6, 7)
    first_tokens = blend.tokens(np.arange(12))[:, 0]
    is_last = (first_tokens == 8) & (np.arange(12) < len(blend))
    expected = np.where(is_last, 1, 4) * (np.arange(12) < len(blend))
    assert blend.num_labels(np.arange(12)).tolist() == expected.tolist()
    assert is_last.sum() == 1
    assert not blend.tokens(np.arange(len(blend), 12)).any()
    assert [places.tolist() for places in blend.boundaries(range(10))] == [[]] * 10


SIZE = 90
WEIGHTS = [2.0, 0.5]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[BertDataConfig]:
    """Corpora of different lengths."""
    prefixes = []
    for seed, documents in ((1, 20), (2, 70)):
        content = random_documents(np.random.default_rng(seed), documents, SIZE)
        folder = tmp_path_factory.mktemp(f"corpus{seed}")
        prefixes.append(write_sentences(folder, content, SIZE, sequence_length=24))
    return prefixes


HOW: dict[str, Any] = {"split": "train", "seed": 5, "vocabulary_size": SIZE}


def opened_blend(data: BertDataConfig, shuffle: bool = True) -> BlendedBertSamples:
    samples = open_bert_samples(data, **HOW, shuffle=shuffle)
    assert isinstance(samples, BlendedBertSamples)
    return samples


def blended(corpora: Sequence[BertDataConfig]) -> BertDataConfig:
    weights = {data.prefix: weight for data, weight in zip(corpora, WEIGHTS, strict=True)}
    return replace(corpora[0], prefix="", blend=weights)


def test_blended_samples_are_those_of_their_corpora(corpora: list[BertDataConfig]) -> None:
    data = blended(corpora)
    samples = opened_blend(data)
    single = [open_bert_samples(replace(data, prefix=prefix, blend={}), **HOW) for prefix in data.prefixes]

    def rows_of(batch: BertBatch) -> list[tuple[bytes, ...]]:
        return [tuple(field[row].tobytes() for field in batch) for row in range(len(batch.lengths))]

    count = 2 * len(samples)
    numbers, within = BlendOrder(WEIGHTS).assign(np.arange(count))
    expected = [rows_of(single[which].batch([each]))[0] for which, each in zip(numbers, within, strict=True)]
    assert rows_of(samples.batch(range(count))) == expected
    some = np.random.default_rng(0).permutation(count)[:17]
    assert rows_of(samples.batch(some)) == [expected[each] for each in some]
    assert np.array_equal(samples.lengths(some), samples.batch(some).lengths)
    texts = [single[numbers[each]].text([within[each]]) for each in some]
    assert sorted(samples.text(some)) == sorted(np.concatenate(texts))


def test_an_unrepeated_bert_blend_ends_with_its_first_corpus(corpora: list[BertDataConfig]) -> None:
    samples = opened_blend(blended(corpora), shuffle=False)
    ends = [BlendOrder(WEIGHTS).ordinal_of(index, len(corpus)) for index, corpus in enumerate(samples.corpora)]
    assert len(samples) == min(ends) < max(ends)
    ordinals = [len(samples) - 1, len(samples), 10 * len(samples)]
    batch = samples.batch(ordinals)
    assert batch.sentence_weights.tolist() == [1.0, 0.0, 0.0]
    assert (batch.loss_mask.sum(axis=1) > 0).tolist() == [True, False, False]
    assert np.array_equal(samples.lengths(ordinals), batch.lengths)


def test_shards_of_different_vocabularies_are_refused(tmp_path: Path) -> None:
    """All shards have the same hash of their tokenizer, so that only the vocabularies differ."""
    corpora = []
    for size in (SIZE, SIZE - 10):
        (tmp_path / str(size)).mkdir()
        content = random_documents(np.random.default_rng(size), 20, SIZE - 10)
        data = write_sentences(tmp_path / str(size), content, size, sequence_length=24)
        shard = IndexedDataset(data.prefix)
        counts = {"num_documents": shard.num_documents, "num_tokens": len(shard.tokens)}
        manifest = shard_manifest(tokenizer=data.tokenizer, vocabulary_size=size, **counts)
        manifest_path(data.prefix).write_text(manifest.to_json())
        corpora.append(data)
    with pytest.raises(DataError, match="different vocabularies"):
        opened_blend(replace(blended(corpora), tokenizer=""))


PREFIX, SUFFIX, MIDDLE, END = 9001, 9002, 9003, 9000
RULE = FillInTheMiddleRule(
    rate=0.5, suffix_first=0.25, prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE, end_of_document=END
)


@pytest.fixture
def samples(tmp_path: Path) -> GptSamples:
    """Token k of the corpus is k mod 9000, except the mark at the end of each document of 1 to 40 tokens."""
    documents, first = [], 0
    for length in np.random.default_rng(0).integers(0, 40, size=2000).tolist():
        documents.append([[*(place % 9000 for place in range(first, first + length)), END]])
        first += length + 1
    prefix = write_shard(tmp_path / "shard", documents)
    return GptSamples(prefix, split="train", shares="1", sequence_length=50, seed=3)


def restored(text: list[int]) -> tuple[str, list[int]]:
    """Return how a text was rearranged, and the original text."""
    if PREFIX not in text:
        return "not", text
    suffix, middle = text.index(SUFFIX), text.index(MIDDLE)
    if text[1] == SUFFIX:
        return "suffix first", text[middle + 1 :] + text[2:middle]
    return "prefix first", text[1:suffix] + text[middle + 1 :] + text[suffix + 1 : middle]


def test_documents_can_be_restored_except_three_tokens(samples: GptSamples) -> None:
    ordinals = np.arange(len(samples))
    changed = FillInTheMiddle(samples, RULE, seed=5)
    kinds: list[str] = []
    looks_suffix_first = 0.0
    boundaries = samples.boundaries(ordinals)
    assert len(changed) == len(samples)
    again = int(np.flatnonzero(samples.windows(np.arange(len(samples)) + len(samples)) == samples.windows(4))[0])
    assert np.array_equal(samples.tokens(4), samples.tokens(again + len(samples)))
    assert not np.array_equal(changed.tokens(4), changed.tokens(again + len(samples)))
    assert not np.array_equal(changed.tokens(4), FillInTheMiddle(samples, RULE, seed=6).tokens(4))
    assert np.array_equal(changed.num_labels(ordinals), samples.num_labels(ordinals))
    assert all(map(np.array_equal, changed.boundaries(ordinals), boundaries))
    rows = zip(changed.tokens(ordinals), samples.tokens(ordinals), boundaries, strict=True)
    for changed_row, original, places in rows:
        bounds = [0, *places.tolist(), 51]
        for begin, end in itertools.pairwise(bounds):
            before, after = original[begin:end].tolist(), changed_row[begin:end].tolist()
            if before[-1] == END:
                assert after[-1] == END
                before, after = before[:-1], after[:-1]
            kind, text = restored(after)
            assert text == (before if kind == "not" else before[3:])
            if len(before) > 3:
                kinds.append(kind)
                # An empty prefix gives both forms the same tokens; both cuts are one of len(before) - 2 places.
                looks_suffix_first += 0.5 * (0.25 + 0.75 * (1 - (1 - 1 / (len(before) - 2)) ** 2))
            else:
                assert kind == "not"
    # Within five standard deviations.
    allowed = 5 * (0.25 * len(kinds)) ** 0.5
    assert kinds.count("not") == pytest.approx(0.5 * len(kinds), abs=allowed)
    assert kinds.count("suffix first") == pytest.approx(looks_suffix_first, abs=allowed)


def test_cuts_are_uniform(samples: GptSamples) -> None:
    changed = FillInTheMiddle(samples, RULE, seed=8)
    shares = []
    for row in changed.tokens(np.arange(len(samples))):
        text = row.tolist()
        for begin in np.flatnonzero(row == PREFIX).tolist():
            part = text[begin:]
            if part[1] == SUFFIX or END not in part:
                continue
            part = part[: part.index(END)]
            suffix, middle = part.index(SUFFIX), part.index(MIDDLE)
            if len(part) > 10:
                shares.append(np.array([suffix - 1, middle - suffix - 1, len(part) - middle - 1]) / (len(part) - 3))
    assert len(shares) > 200
    assert np.mean(shares, axis=0) == pytest.approx([1 / 3] * 3, abs=5 * (1 / 18 / len(shares)) ** 0.5)
