"""A run that is stopped anywhere and goes on at another data-parallel size reads what an undisturbed one reads."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.batches import MicrobatchSource
from megapipe.data.megatron_order import MegatronSamples
from megapipe.data.mixing import BlendedSamples, BlendOrder, FillInTheMiddle, FillInTheMiddleRule
from megapipe.data.samples import GptSamples, PackedSamples, SampleSet
from tests.data.commands import ROOT
from tests.data.shards import numbered_documents, write_shard

layouts = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))  # data size, micro size, micro-batches
Row = tuple[int, tuple[int, ...]]


def opened(folder: Path, kind: str) -> SampleSet:
    """Epochs of 17, 23 and 5 samples, so that runs of a few steps end in the middle of one."""
    prefixes = [
        write_shard(folder / f"corpus{first}", numbered_documents(lengths, first))
        for first, lengths in ((0, [30, 39]), (1000, [93]), (2000, [7, 9, 6]))
    ]
    where: dict[str, Any] = {"split": "train", "shares": "1", "sequence_length": 4, "seed": 11}
    if kind == "packed":
        return PackedSamples(prefixes[2], **where)
    if kind == "megatron":
        return MegatronSamples(prefixes[0], **where, num_samples=600)
    corpora = [GptSamples(prefix, **where) for prefix in prefixes]
    if kind == "blend":
        return BlendedSamples(corpora, BlendOrder([0.5, 0.3, 0.2]), repeats=True)
    if kind == "fill in the middle":
        marks = {"prefix": 9001, "suffix": 9002, "middle": 9003, "end_of_document": None}
        return FillInTheMiddle(corpora[0], FillInTheMiddleRule(rate=0.7, suffix_first=0.5, **marks), seed=3)
    return corpora[0]


@pytest.fixture(scope="module", params=["one corpus", "blend", "packed", "fill in the middle", "megatron"])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return opened(tmp_path_factory.mktemp("resume"), request.param)


def read(samples: SampleSet, consumed: int, layout: tuple[int, int, int]) -> list[Row]:
    """Ordinal and token ids of what all ranks read in one step."""
    data_size, micro_size, num_microbatches = layout
    rows: list[Row] = []
    for rank in range(data_size):
        source = MicrobatchSource(samples, data_rank=rank, data_size=data_size, micro_size=micro_size)
        for batch in source.step(consumed, num_microbatches):
            windows = [(*tokens, labels[-1]) for tokens, labels in zip(batch.tokens, batch.labels, strict=True)]
            rows += zip(batch.ordinals.tolist(), (tuple(map(int, window)) for window in windows), strict=True)
    return rows


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(layouts, min_size=1, max_size=8), start=st.integers(0, 100))
def test_the_union_is_the_undisturbed_runs(samples: SampleSet, steps: list, start: int) -> None:
    consumed, seen = start, []
    for layout in steps:
        seen += read(samples, consumed, layout)
        consumed += layout[0] * layout[1] * layout[2]
    undisturbed = read(samples, start, (1, 1, consumed - start))
    assert sorted(seen) == sorted(undisturbed)
    assert [ordinal for ordinal, _ in seen] == list(range(start, consumed))


@settings(max_examples=15, deadline=None)
@given(
    microbatches=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 6)), min_size=1, max_size=30),
    threads=st.integers(2, 4),
)
def test_any_number_of_threads_reads_the_same(
    samples: SampleSet, microbatches: list[tuple[int, int]], threads: int
) -> None:
    ordinals = [np.arange(first, first + count) for first, count in microbatches]
    with ThreadPoolExecutor(threads) as pool:
        rows = list(pool.map(samples.tokens, ordinals))
        boundaries = list(pool.map(samples.boundaries, ordinals))
    for numbers, tokens, starts in zip(ordinals, rows, boundaries, strict=True):
        assert np.array_equal(tokens, samples.tokens(numbers))
        assert [each.tolist() for each in starts] == [each.tolist() for each in samples.boundaries(numbers)]


def test_epochs_of_a_blends_corpora_are_whole(tmp_path: Path) -> None:
    """Every window of each corpus comes once before one is repeated."""
    samples = opened(tmp_path, "blend")
    rows = [tokens for _, tokens in read(samples, 0, (2, 1, 200))]
    for first, per_epoch in ((0, 17), (1000, 23), (2000, 5)):
        mine = [tokens for tokens in rows if tokens[0] // 1000 == first // 1000]
        for begin in range(0, len(mine) - per_epoch, per_epoch):
            assert len(set(mine[begin : begin + per_epoch])) == per_epoch


@pytest.mark.slow
def test_the_benchmark_ends_in_one_json_object(tmp_path: Path) -> None:
    sizes = ["--tokens", "100000", "10000000000000", "--corpora", "20", "--blend-samples", "1000"]
    sizes += ["--loader-bytes", "1000000", "--documents", "100000"]
    command = [sys.executable, "benchmarks/sample_order.py", "--folder", str(tmp_path), *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True, cwd=ROOT)
    figures = json.loads(result.stdout.splitlines()[-1])
    small, large = figures["orders"]
    assert small["megatron_start_ms"] > 0
    assert large["sample_us"] > 0
    assert "megatron_start_ms" not in large
    assert figures["blend"]["corpora"] == 20
    assert min(figures["loaders"].values()) > 0
    (documents,) = figures["documents"]
    assert documents["index_bytes"] == 34 + 20 * 100_000 + 8
    assert not list(tmp_path.iterdir())
