"""Samples are windows over the split's documents in a keyed order, compared with a plain concatenation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError
from megapipe.data.megatron_order import MegatronSamples
from megapipe.data.samples import SPLIT_NAMES, GptSamples, PackedSamples, parse_shares, split_documents
from tests.data.shards import numbered_documents, write_shard

fresh_files = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
shard_lengths = st.lists(st.integers(0, 9), max_size=20)


def open_samples(prefix: Path, **changes: object) -> GptSamples:
    settings: dict = {"split": "train", "shares": "1", "sequence_length": 4, "seed": 5, **changes}
    return GptSamples(prefix, **settings)


@fresh_files
@given(lengths=shard_lengths, length=st.integers(1, 7), shares=st.sampled_from(["1", "1,1", "2,1,1", "0,1,0"]))
def test_samples_cover_the_split_in_windows(tmp_path: Path, lengths: list, length: int, shares: str) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents(lengths))  # token k of the shard is k + 1
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    for split, documents in split_documents(len(lengths), shares).items():
        stream = np.arange(starts[documents.start], starts[documents.stop]) + 1
        expected = [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)]
        changes: dict = {"split": split, "shares": shares, "sequence_length": length}
        if not expected:
            with pytest.raises(
                DataError, match=f"the {split} split of .*shard has {len(documents)} of {len(lengths)} documents"
            ):
                open_samples(prefix, **changes)
            continue
        samples = open_samples(prefix, **changes)
        for epoch in range(2):
            ordinals = range(epoch * len(samples), (epoch + 1) * len(samples))
            read = sorted(samples.tokens(ordinal).tolist() for ordinal in ordinals)
            assert read == [window.tolist() for window in expected]
            for ordinal in ordinals:
                first = samples.tokens(ordinal)[0] - 1
                inside = sorted({int(s - first) for s in starts if first < s <= first + length and s < starts[-1]})
                assert samples.boundaries([ordinal])[0].tolist() == [p for p in inside if first + p < stream[-1]]


@fresh_files
@given(lengths=shard_lengths, length=st.integers(1, 7))
def test_sequential_order_scores_every_prediction_once(tmp_path: Path, lengths: list, length: int) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents(lengths))
    if sum(lengths) < 2:
        return
    samples = open_samples(prefix, sequence_length=length, shuffle=False)
    labels = []
    for ordinal in range(len(samples) + 3):
        count = samples.num_labels(ordinal)
        tokens = samples.tokens(ordinal)
        assert tokens.shape == (length + 1,)
        assert not tokens[count + 1 :].any()
        assert (count == 0) == (ordinal >= len(samples))
        labels += tokens[1 : count + 1].tolist()
    assert labels == list(range(2, sum(lengths) + 1))


def test_epochs_and_seeds_have_different_orders(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents([4001]))
    samples = open_samples(prefix)
    first, second = (samples.windows(np.arange(1000) + epoch * 1000) for epoch in range(2))
    other = open_samples(prefix, seed=6).windows(np.arange(1000))
    for one, two in [(first, second), (first, other), (first, np.arange(1000))]:
        assert (one == two).sum() <= 12
    mixed = np.array([[1500, 3], [999, 1000]])
    assert samples.windows(mixed).tolist() == [[second[500], first[3]], [first[999], second[0]]]


@pytest.mark.parametrize(("bad", "dtype"), [(300, "<u2"), (-7, "<i4")])
@pytest.mark.parametrize("kind", [GptSamples, PackedSamples, MegatronSamples])
def test_ids_beyond_the_vocabulary_are_located(tmp_path: Path, kind: Any, bad: int, dtype: str) -> None:
    prefix = write_shard(tmp_path / "wrong", [[[1, 2]], [[3, 4, bad, 8, 9, 7]]], dtype)
    more = {"num_samples": 1} if kind is MegatronSamples else {"shuffle": False}
    where: dict[str, Any] = {"split": "train", "shares": "1", "sequence_length": 7, "seed": 5, **more}
    with pytest.raises(DataError, match=rf"token 4 of .*wrong.bin is {bad}, outside the model's vocabulary of 300"):
        kind(prefix, **where, vocabulary_size=300).tokens(0)
    tokens = kind(prefix, **where).tokens(0)
    assert tokens.dtype == np.int64
    assert bad in tokens


def test_negative_ordinals_and_empty_samples_are_refused(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents([9]))
    with pytest.raises(DataError, match="ordinal -1"):
        open_samples(prefix).tokens(-1)
    with pytest.raises(DataError, match="sequence_length is 0"):
        open_samples(prefix, sequence_length=0)


@pytest.mark.parametrize("text", ["", "a", "1,2,3,4", "0,0", "-1,2", "nan", "inf,1", "9;1"])
def test_unusable_shares_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"data.split is .* of at least 0, not all 0, .* 949,50,1"):
        parse_shares(text)


@settings(max_examples=100, deadline=None)
@given(num=st.integers(0, 10**9), shares=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any))
def test_splits_partition_the_documents(num: int, shares: list[float]) -> None:
    ranges = split_documents(num, ",".join(map(repr, shares)))
    assert list(ranges) == list(SPLIT_NAMES)
    assert ranges["train"].start == 0
    assert ranges["train"].stop == ranges["validation"].start
    assert ranges["validation"].stop == ranges["test"].start
    assert ranges["test"].stop == num or shares[2:] == []
    assert split_documents(1000, "949,50,1")["validation"] == range(949, 999)
    assert all(0 <= documents.start <= documents.stop <= num for documents in ranges.values())
