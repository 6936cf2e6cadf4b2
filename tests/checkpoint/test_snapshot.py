"""The memory of a copy: allocated beside what the caller does, kept from copy to copy, equal to what was copied."""

import mmap
import resource
import sys
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.save import Content
from megapipe.checkpoint.snapshot import Snapshot
from megapipe.checkpoint.tensor_file import FileTensor
from megapipe.spec.parameters import Box

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def contents(*lengths: int) -> list[Content]:
    """Tensors of so many fp32 elements, each of another value."""
    made = []
    for number, length in enumerate(lengths, start=1):
        extent = Extent.whole(Box((0,), (length,)))
        values = torch.full((length,), float(number))
        made.append(Content(f"{number}", "weights", (length,), extent, FileTensor(f"{number}", (length,), values)))
    return made


@pytest.mark.parametrize("prepared", [(), (3, 7), (1,), (100, 100)])
def test_copies_are_what_was_copied_whatever_was_prepared(prepared: tuple[int, ...]) -> None:
    snapshot, given = Snapshot(pinned=False), contents(3, 7)
    if prepared:
        snapshot.prepare(contents(*prepared))
    taken = snapshot.take(given)
    for each in given:
        each.tensor.values.fill_(torch.nan)
    assert [each.tensor.values.tolist() for each in taken] == [[1.0] * 3, [2.0] * 7]
    assert [each.tensor.key for each in taken] == ["1", "2"]


def test_memory_is_kept_and_never_twice() -> None:
    snapshot = Snapshot(pinned=False)
    assert snapshot.take([]) == []
    snapshot.prepare(contents(1000))
    snapshot.settle()
    assert snapshot.num_bytes == 4032, "whole cache lines"
    snapshot.prepare(contents(10))
    snapshot.take(contents(1000))
    assert snapshot.num_bytes == 4032
    snapshot.take(contents(2000))
    assert snapshot.num_bytes == 8000


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_prepared_copy_touches_no_new_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB, of which each 4 kB would otherwise cost an interruption within the first save."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    snapshot, given = Snapshot(pinned=False), contents(1 << 24)
    snapshot.prepare(given)
    snapshot.settle()
    before = faults()
    snapshot.take(given)
    assert faults() - before < 500


@pytest.mark.skipif(
    sys.platform != "linux" or not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="the system has no huge pages",
)
def test_memory_comes_in_huge_pages() -> None:
    snapshot, given = Snapshot(pinned=False), contents(1 << 24)
    before = faults()
    snapshot.take(given)
    assert faults() - before < (64 << 20) / 4096 / 4
