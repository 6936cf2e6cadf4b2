"""Micro-batches: masks, labels, documents, and loading in advance. test_resume_order.py has every sample once."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megapipe.data import DataError
from megapipe.data.batches import MicrobatchSource, Prefetcher, microbatch_ordinals
from megapipe.data.samples import GptSamples
from tests.data.shards import numbered_documents, write_shard


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
    how = {"shuffle": False, "micro_size": 4}
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
    right = {"consumed": 0, "data_rank": 0, "data_size": 2, "microbatch": 0, "micro_size": 1, "num_microbatches": 3}
    with pytest.raises(DataError, match="micro-batch"):
        microbatch_ordinals(**{**right, **wrong})


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
