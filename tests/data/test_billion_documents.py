"""The keyed order over 10^9 documents: what starting and drawing read of the index, counted, not timed.

The index of such a corpus takes 20 GB. Here it is computed as it is read, and each read is recorded.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.data import manifest
from megapipe.data.samples import GptSamples
from megapipe.data.shards import IndexedDataset

LENGTH = 1000
"""Tokens of every document except the first, which has one more."""


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
        self.num_tokens = num_documents * LENGTH + 1
        self.sequence_offsets = ComputedArray(
            num_documents, lambda place: np.where(place > 0, 2 * (place * LENGTH + 1), 0)
        )
        self.document_indices = ComputedArray(num_documents + 1, lambda place: place)
        self.tokens = ZeroTokens()
        self._tokens, self._random_tokens = None, False

    def advise_random_index(self) -> None:
        """No file, no pages."""

    @property
    def num_read(self) -> int:
        return self.sequence_offsets.num_read + self.document_indices.num_read


def opened(num_documents: int, monkeypatch: pytest.MonkeyPatch, split: str) -> tuple[GptSamples, ComputedShard]:
    shard = ComputedShard(num_documents)
    monkeypatch.setattr(manifest, "IndexedDataset", lambda prefix, float_tokens: shard)
    samples = GptSamples(Path("computed"), split=split, shares="98,1,1", sequence_length=2048, seed=3)  # type: ignore[arg-type]
    return samples, shard


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_billion_documents_cost_what_a_thousand_do(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {}
    for num_documents in (10**3, 10**9):
        samples, shard = opened(num_documents, monkeypatch, split)
        at_start = shard.num_read
        ordinals = np.linspace(0, min(len(samples), 1000) - 1, 4).astype(np.int64)
        assert samples.tokens(ordinals).shape == (4, 2049)
        samples.boundaries(ordinals)
        reads[num_documents] = (at_start, shard.num_read - at_start)
    assert reads[10**9][0] == reads[10**3][0] <= 4
    # Four binary searches a sample, each of log2(documents) steps, and the two or three documents it finds.
    assert reads[10**9][1] <= 4 * (4 * 31 + 6)


def test_documents_among_a_billion_are_where_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = opened(10**9, monkeypatch, "train")
    assert len(samples) == 980_000_000 * LENGTH // 2048
    windows = samples.windows(np.arange(200))
    assert len(set(windows.tolist())) == 200
    assert windows.max() > len(samples) * 0.9
    for window, boundaries in zip(windows.tolist(), samples.boundaries(np.arange(200)), strict=True):
        first = window * 2048
        expected = [place for place in range(1, 2049) if (first + place - 1) % LENGTH == 0]
        assert boundaries.tolist() == expected
