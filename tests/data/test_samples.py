"""Samples are windows over the split's documents in a keyed order, or packed documents, each used once in an epoch.
Micro-batches of them have masks and labels, and are loaded in advance; test_resume_order.py changes the layout.
Reads of the index of 10^9 documents, which would take 20 GB, are counted, not timed: it is computed as it is read."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError, manifest
from megapipe.data.batches import MicrobatchSource, Prefetcher, RankOrdinals
from megapipe.data.megatron_order import MegatronSamples
from megapipe.data.samples import SPLIT_NAMES, GptSamples, PackedSamples, best_fit, parse_shares, split_documents
from megapipe.data.shards import IndexedDataset
from tests.data.shards import Document, numbered_documents, write_shard

fresh_files = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
shard_lengths = st.lists(st.integers(0, 9), max_size=20)


def open_samples(prefix: Path, **changes: Any) -> GptSamples:
    return GptSamples(prefix, **{"split": "train", "shares": "1", "sequence_length": 4, "seed": 5, **changes})


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
    for changes, ordinal, message in (({}, -1, "ordinal -1"), ({"sequence_length": 0}, 0, "sequence_length is 0")):
        with pytest.raises(DataError, match=message):
            open_samples(prefix, **changes).tokens(ordinal)


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


def open_packed(prefix: Path, length: int, shuffle: bool, seed: int = 4) -> PackedSamples:
    return PackedSamples(prefix, split="train", shares="1", sequence_length=length, seed=seed, shuffle=shuffle)


def scored(samples: PackedSamples, ordinals: range) -> list[tuple[int, int]]:
    """Return every (input, label) that the loss counts."""
    source = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=1, mask_end_of_document=True)
    pairs = []
    for ordinal in ordinals:
        batch = source.microbatch(ordinal, 0, 1)
        kept = batch.loss_mask > 0
        pairs += zip(batch.tokens[kept].tolist(), batch.labels[kept].tolist(), strict=True)
    return pairs


@fresh_files
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


def make_source(folder: Path, lengths: list[int], shuffle: bool = True, **changes: object) -> MicrobatchSource:
    prefix = write_shard(folder / "shard", numbered_documents(lengths))
    samples = GptSamples(prefix, split="train", shares="1", sequence_length=4, seed=1, shuffle=shuffle)
    arguments: dict = {"data_rank": 0, "data_size": 1, "micro_size": 2, **changes}
    return MicrobatchSource(samples, **arguments)


def test_labels_follow_tokens_and_the_epoch_is_complete(tmp_path: Path) -> None:
    sources = [make_source(tmp_path, [33], data_rank=rank, data_size=2) for rank in range(2)]
    batches = [batch for source in sources for batch in source.step(0, 2)]
    for batch in batches:
        assert batch.tokens.dtype == batch.labels.dtype == batch.ordinals.dtype == np.int64
        assert batch.loss_mask.dtype == np.float32
        assert batch.tokens.shape == batch.loss_mask.shape == (2, 4)
        assert np.array_equal(batch.labels, batch.tokens + 1)
        assert batch.loss_mask.all()
    assert np.concatenate([batch.ordinals for batch in batches]).tolist() == list(range(8))
    assert sorted(np.concatenate([batch.tokens.ravel() for batch in batches])) == list(range(1, 33))


def test_padding_and_document_ends_are_masked(tmp_path: Path) -> None:
    lengths = [3, 5, 2]  # tokens 1-3, 4-8, 9-10: windows 1-5, 5-9, 9-10
    how: dict[str, Any] = {"shuffle": False, "micro_size": 4}
    plain = make_source(tmp_path, lengths, **how).microbatch(0, 0, 1)
    assert plain.loss_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    masked = make_source(tmp_path, lengths, **how, mask_end_of_document=True).microbatch(0, 0, 1)
    # The labels 4 and 9 start documents.
    assert masked.loss_mask.tolist() == [[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert (masked.labels[0, 2], masked.labels[1, 3]) == (4, 9)


@pytest.mark.parametrize(
    "wrong", [{"data_rank": 2}, {"data_rank": -1}, {"microbatch": 3}, {"micro_size": 0}, {"consumed": -1}]
)
def test_impossible_positions_are_refused(wrong: dict[str, int]) -> None:
    rank = {name: wrong.get(name, right) for name, right in (("data_rank", 0), ("data_size", 2), ("micro_size", 1))}
    with pytest.raises(DataError, match="micro-batch"):
        RankOrdinals(**rank).ordinals(wrong.get("consumed", 0), wrong.get("microbatch", 0), 3)


END = 0


def test_documents_end_at_the_mark(tmp_path: Path) -> None:
    """Megatron-LM finds documents by their end mark; here the index contains their positions."""
    lengths = [*np.random.default_rng(1).integers(0, 12, size=60), 90]  # the last fills whole samples
    prefix = write_shard(tmp_path / "shard", [[[7] * int(length) + [END]] for length in lengths])
    samples = GptSamples(prefix, split="train", shares="1", sequence_length=16, seed=2)
    source = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=len(samples), isolate_documents=True)
    batch = source.microbatch(0, 0, 1)
    assert batch.document_starts is not None
    for tokens, starts in zip(batch.tokens, batch.document_starts, strict=True):
        begin = 0
        for place, token in enumerate(tokens):
            assert starts[place] == begin
            if token == END:
                begin = place + 1
    assert np.array_equal(source.document_starts(batch.ordinals), batch.document_starts)
    plain = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=2)
    assert plain.microbatch(0, 0, 1).document_starts is None


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}


def test_results_come_in_order() -> None:
    with Prefetcher(lambda x: x * x, range(50), depth=3) as squares:
        assert list(squares) == [x * x for x in range(50)]
        assert list(squares) == []


def test_endless_requests_are_prefetched_to_a_bounded_depth() -> None:
    loaded: list[int] = []
    with Prefetcher(loaded.append, itertools.count(), depth=2) as results:
        next(results)
        deadline = time.monotonic() + 10
        while len(loaded) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert loaded == [0, 1, 2, 3]  # one taken, two waiting, one loaded and waiting for room


def test_errors_are_raised_in_their_turn() -> None:
    def load(x: int) -> int:
        if x == 2:
            raise OSError("disk on fire")
        return x

    def requests() -> Iterator[int]:
        yield 1
        raise KeyError("plan")

    def ends(x: int) -> int:
        return next(iter(()))

    for function, asked, results, error, message in (
        (load, itertools.count(), [0, 1], OSError, "disk on fire"),
        (load, requests(), [1], KeyError, "plan"),
        (ends, [7], [], RuntimeError, "loads 7 raised StopIteration"),
    ):
        with Prefetcher(function, asked, depth=8) as prefetcher:
            assert list(itertools.islice(prefetcher, len(results))) == results
            with pytest.raises(error, match=message):
                next(prefetcher)
            assert list(prefetcher) == []
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher(load, [], depth=0)


@pytest.mark.parametrize("depth", [1, 3])
def test_close_at_any_moment(depth: int) -> None:
    for taken in range(6):
        prefetcher = Prefetcher(lambda x: x, itertools.count(), depth=depth)
        assert list(itertools.islice(prefetcher, taken)) == list(range(taken))
        prefetcher.close()
        prefetcher.close()
        assert list(prefetcher) == []


TOKENS_OF_A_DOCUMENT = 1000
"""The number of tokens of each of a billion documents, except the first, which has one more."""


class ComputedArray:
    """int64 [size] by a rule, as a mapped file is read; counts the elements that are asked for."""

    def __init__(self, size: int, rule: Any) -> None:
        self._size, self._rule, self.num_read = size, rule, 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self._size))
        self.num_read += np.size(places)
        return self._rule(np.asarray(places) % self._size)


class ZeroTokens:
    """A mapped file of zeros."""

    def __getitem__(self, places: slice) -> np.ndarray:
        return np.zeros(places.stop - places.start, dtype=np.uint16)


class ComputedShard(IndexedDataset):
    """Documents of one sequence each."""

    tokens: Any = None
    sequence_offsets: Any = None
    document_indices: Any = None

    def __init__(self, num_documents: int) -> None:
        self.prefix = "computed"
        self.dtype = np.dtype("<u2")
        self.num_sequences = self.num_documents = num_documents
        self.num_tokens = num_documents * TOKENS_OF_A_DOCUMENT + 1
        self.sequence_offsets = ComputedArray(
            num_documents, lambda place: np.where(place > 0, 2 * (place * TOKENS_OF_A_DOCUMENT + 1), 0)
        )
        self.document_indices = ComputedArray(num_documents + 1, lambda place: place)
        self.tokens = ZeroTokens()
        self._tokens, self._random_tokens = None, False

    def advise_random_index(self) -> None:
        """No file, no pages."""

    @property
    def num_read(self) -> int:
        return self.sequence_offsets.num_read + self.document_indices.num_read


def open_computed(num_documents: int, monkeypatch: pytest.MonkeyPatch, split: str) -> tuple[GptSamples, ComputedShard]:
    shard = ComputedShard(num_documents)
    monkeypatch.setattr(manifest, "IndexedDataset", lambda prefix, float_tokens: shard)
    samples = GptSamples(Path("computed"), split=split, shares="98,1,1", sequence_length=2048, seed=3)  # type: ignore[arg-type]
    return samples, shard


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_billion_documents_cost_what_a_thousand_do(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {}
    for num_documents in (10**3, 10**9):
        samples, shard = open_computed(num_documents, monkeypatch, split)
        at_start = shard.num_read
        ordinals = np.linspace(0, min(len(samples), 1000) - 1, 4).astype(np.int64)
        assert samples.tokens(ordinals).shape == (4, 2049)
        samples.boundaries(ordinals)
        reads[num_documents] = (at_start, shard.num_read - at_start)
    assert reads[10**9][0] == reads[10**3][0] <= 4
    # Four binary searches a sample, each of log2(documents) steps, and the two or three documents it finds.
    assert reads[10**9][1] <= 4 * (4 * 31 + 6)


def test_documents_among_a_billion_are_where_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = open_computed(10**9, monkeypatch, "train")
    assert len(samples) == 980_000_000 * TOKENS_OF_A_DOCUMENT // 2048
    windows = samples.windows(np.arange(200))
    assert len(set(windows.tolist())) == 200
    assert windows.max() > len(samples) * 0.9
    for window, boundaries in zip(windows.tolist(), samples.boundaries(np.arange(200)), strict=True):
        first = window * 2048
        expected = [place for place in range(1, 2049) if (first + place - 1) % TOKENS_OF_A_DOCUMENT == 0]
        assert boundaries.tolist() == expected
