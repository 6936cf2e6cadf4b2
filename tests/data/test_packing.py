"""Packed samples: best fit by its definition, and every prediction of every document once in an epoch."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError
from megapipe.data.batches import MicrobatchSource
from megapipe.data.samples import PackedSamples, best_fit
from tests.data.shards import Document, write_shard


def rooms_by_definition(sizes: list[int], capacity: int) -> list[int]:
    """Return the room left in every bin: each piece is put into the fullest bin that has room."""
    rooms: list[int] = []
    for size in sizes:
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 40), shares=st.lists(st.floats(0, 1), max_size=60), skew=st.sampled_from([0.3, 1.0, 3.0])
)
def test_best_fit_is_its_definition(capacity: int, shares: list[float], skew: float) -> None:
    sizes = sorted((1 + int(share**skew * (capacity - 1)) for share in shares), reverse=True)
    bins = best_fit(np.array(sizes, dtype=np.int64), capacity)
    filled = np.bincount(bins, weights=sizes) if sizes else np.empty(0)
    assert sorted(capacity - filled) == rooms_by_definition(sizes, capacity)


def documents_of(lengths: list[int]) -> list[Document]:
    """Return documents in which token k of document d is 100 d + k; every other one has two sequences."""
    documents: list[Document] = []
    for index, length in enumerate(lengths):
        tokens = list(range(100 * index, 100 * index + length))
        parts = [tokens[: length // 2], tokens[length // 2 :]] if index % 2 else [tokens]
        documents.append([part for part in parts if part])
    return documents


def open_packed(prefix: Path, length: int, shuffle: bool, **changes: object) -> PackedSamples:
    arguments: dict = {"split": "train", "shares": "1", "seed": 4, **changes}
    return PackedSamples(prefix, sequence_length=length, shuffle=shuffle, **arguments)


def scored(samples: PackedSamples, ordinals: range) -> list[tuple[int, int]]:
    """Return every (input, label) that the loss counts."""
    source = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=1, mask_end_of_document=True)
    pairs = []
    for ordinal in ordinals:
        batch = source.microbatch(ordinal, 0, 1)
        kept = batch.loss_mask > 0
        pairs += zip(batch.tokens[kept].tolist(), batch.labels[kept].tolist(), strict=True)
    return pairs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=15), length=st.integers(1, 25), shuffle=st.booleans())
def test_every_prediction_of_every_document_once(
    tmp_path: Path, lengths: list[int], length: int, shuffle: bool
) -> None:
    prefix = write_shard(tmp_path / "shard", documents_of(lengths))
    expected = [(100 * d + k, 100 * d + k + 1) for d, size in enumerate(lengths) for k in range(size - 1)]
    if not expected:
        with pytest.raises(DataError, match=r"none of 2 tokens or more"):
            open_packed(prefix, length, shuffle)
        return
    samples = open_packed(prefix, length, shuffle)
    for epoch in range(2 if shuffle else 1):
        assert sorted(scored(samples, range(epoch * len(samples), (epoch + 1) * len(samples)))) == expected
    if not shuffle:
        assert scored(samples, range(len(samples), len(samples) + 3)) == []


def test_the_seed_decides_which_documents_share_a_sample(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "shard", documents_of([5] * 40))

    def partners(seed: int) -> set[frozenset[int]]:
        samples = open_packed(prefix, 9, shuffle=False, seed=seed)
        return {frozenset((tokens // 100).tolist()) for tokens in samples.tokens(np.arange(len(samples)))}

    assert partners(1) == partners(1)
    assert len(partners(1) & partners(2)) < 10
