"""Blends keep their proportions at every prefix, hand out every sample once, and go on from anywhere."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.blend import BlendedSamples
from megapipe.data.blend_order import LONGEST_PERIOD, BlendOrder, weights_are_rounded, whole_parts
from megapipe.data.errors import DataError
from megapipe.data.samples import GptSamples
from tests.data.shards import numbered_documents, write_shard

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


def test_a_thousand_corpora_deviate_by_less_than_one_sample() -> None:
    weights = np.random.default_rng(3).lognormal(0, 2, size=1000)
    order = BlendOrder([round(weight + 0.1, 1) for weight in weights.tolist()])
    assert order.period < LONGEST_PERIOD
    assert largest_deviation(order) < 1


@settings(max_examples=60, deadline=None)
@given(weights=weights_strategy, start=st.integers(0, 2**50))
def test_every_corpus_counts_up_by_one_from_anywhere(weights: list[int], start: int) -> None:
    order = BlendOrder(weights)
    corpora, within = order.assign(np.arange(start, start + 300))
    passed = Counter(dict(enumerate(order.counts(start).tolist())))
    for offset, (corpus, sample) in enumerate(zip(corpora.tolist(), within.tolist(), strict=True)):
        assert sample == passed[corpus]
        assert order.ordinal_of(corpus, sample) == start + offset
        passed[corpus] += 1
    assert order.counts(start + 300).tolist() == [passed[corpus] for corpus in range(len(weights))]


def test_weights_count_as_the_decimals_they_are_written_as() -> None:
    assert whole_parts([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_parts([3, 3]) == (1, 1)
    assert whole_parts([2.5, 7.5e2]) == (1, 300)
    assert not weights_are_rounded([0.1, 0.2, 0.7])
    assert weights_are_rounded([1, 2**20 + 1])
    assert whole_parts([1, 2**20 + 1]) == (1, 2**20 - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-12, 1e12), min_size=2, max_size=40))
def test_weights_without_small_ratios_are_rounded_to_parts(weights: list[float]) -> None:
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


def open_blend(folder: Path, sizes: list[int], weights: list[float], shuffle: bool = True) -> BlendedSamples:
    """Corpora of one document each; token k of corpus c is 1000 c + k."""
    corpora = []
    for index, size in enumerate(sizes):
        prefix = write_shard(folder / f"corpus{index}", numbered_documents([size], 1000 * index))
        corpora.append(GptSamples(prefix, split="train", shares="1", sequence_length=4, seed=7, shuffle=shuffle))
    return BlendedSamples(corpora, BlendOrder(weights), repeats=shuffle)


def test_every_corpus_goes_through_its_own_epochs(tmp_path: Path) -> None:
    blend = open_blend(tmp_path, [9, 41, 21], [1, 1, 2])
    tokens = blend.tokens(np.arange(80).reshape(4, 20))
    assert tokens.shape == (4, 20, 5)
    firsts = tokens.reshape(80, 5)[:, 0]
    for index, (per_epoch, taken) in enumerate([(2, 20), (10, 20), (5, 40)]):
        mine = firsts[firsts // 1000 == index]
        assert len(mine) == taken
        for epoch in mine.reshape(-1, per_epoch):
            assert sorted(epoch % 1000) == [4 * window for window in range(per_epoch)]
    assert blend.num_labels(np.arange(80)).tolist() == [4] * 80


def test_a_blend_that_does_not_repeat_ends_with_its_first_corpus(tmp_path: Path) -> None:
    blend = open_blend(tmp_path, [10, 100], [1, 1], shuffle=False)
    assert len(blend) in (6, 7)
    labels = blend.num_labels(np.arange(10))
    assert labels[: len(blend)].tolist() == [4] * 4 + [
        1 if first < 1000 else 4 for first in blend.tokens([4, 5])[:, 0]
    ] + [4] * (len(blend) - 6)
    assert not labels[len(blend) :].any()
    assert not blend.tokens(np.arange(len(blend), 12)).any()
    assert [places.tolist() for places in blend.boundaries(range(10))] == [[]] * 10


def test_batches_are_what_single_samples_are(tmp_path: Path) -> None:
    blend = open_blend(tmp_path, [30, 50], [0.3, 0.7])
    ordinals = np.random.default_rng(0).integers(0, 300, size=200)
    singles = [blend.tokens(ordinal) for ordinal in ordinals]
    assert np.array_equal(blend.tokens(ordinals), np.stack(singles))
