"""The page cache: which part of a file is in memory, and how shards read only what they need."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from megapipe.data import files
from megapipe.data.files import drop_from_page_cache, memory_for_files, resident_share
from megapipe.data.samples import GptSamples, PackedSamples
from megapipe.data.shard_writer import ShardWriter
from megapipe.data.shards import IndexedDataset, bin_path, idx_path
from tests.data.shards import write_shard

PAGES = 300


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file that was just written, and is therefore in memory."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE - 5))
    assert resident_share([path]) == 1.0
    return path


def make_cold(path: Path) -> None:
    """Remove a file from the page cache; skip where that does not work, as in a file system in memory."""
    drop_from_page_cache([path])
    if resident_share([path]) == 1.0:
        pytest.skip("this folder's file system keeps its files in memory")


def test_a_dropped_file_is_read_again(file: Path, tmp_path: Path) -> None:
    available = memory_for_files()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    empty = tmp_path / "empty"
    empty.touch()
    assert (resident_share([empty]), resident_share([file, empty])) == (0.0, 1.0)
    with pytest.raises(OSError, match="missing"):
        drop_from_page_cache([tmp_path / "missing"])
    make_cold(file)
    assert resident_share([file]) == 0.0
    assert len(file.read_bytes()) == PAGES * mmap.PAGESIZE - 5
    assert resident_share([file]) == 1.0


def test_large_files_are_sampled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SAMPLED_RUNS", 7)
    monkeypatch.setattr(files, "PAGES_IN_A_RUN", 4)
    assert resident_share([file]) == 1.0
    make_cold(file)
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # disable readahead
        opened.seek(PAGES // 2 * mmap.PAGESIZE)
        while opened.read(mmap.PAGESIZE):
            pass
    assert resident_share([file]) == pytest.approx(0.5, abs=0.2)


def test_index_searches_read_only_the_pages_they_touch(tmp_path: Path) -> None:
    prefix = tmp_path / "shard"
    piece = write_shard(tmp_path / "piece", [[[1]]] * 10_000)
    with ShardWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(10):
            writer.append_shard(piece)
        writer.commit()
    index = idx_path(prefix)
    pages = index.stat().st_size / mmap.PAGESIZE
    assert pages > 400
    make_cold(index)
    shard = IndexedDataset(prefix)
    shard.search_index()
    for position in (10_000, 50_000, 90_000):
        assert shard.document_starts_between(position - 1, position + 2).tolist() == [position, position + 1]
    assert resident_share([index]) * pages <= 100


@pytest.mark.parametrize("kind", [GptSamples, PackedSamples])
def test_shuffled_samples_read_their_own_pages(tmp_path: Path, kind: type[GptSamples | PackedSamples]) -> None:
    prefix = write_shard(tmp_path / "shard", [[list(range(2000))]] * 2000)
    tokens = bin_path(prefix)
    make_cold(tokens)
    samples = kind(prefix, split="train", shares="1", sequence_length=2048, seed=3)
    drawn = samples.tokens(np.arange(20))
    pages = tokens.stat().st_size / mmap.PAGESIZE
    assert pages > 1900
    assert resident_share([tokens]) * pages <= 20 * 3  # of 2 pages, across 3
    assert np.array_equal(drawn, samples.tokens(np.arange(20)))
