"""The geometry of chunks: parts of a tensor as a box and a range of it, and what two of them have in common."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapipe.spec.parameters import Box


@dataclass(frozen=True)
class Extent:
    """Elements `start <= i < stop` of a box of a global tensor, counted in the box's row-major order.

    A tensor-parallel shard is the whole of its box; an equal share of a flat buffer is a range that may begin and end
    inside a row.
    """

    box: Box
    start: int
    stop: int

    @classmethod
    def whole(cls, box: Box) -> "Extent":
        """All of `box`."""
        return cls(box, 0, box.num_elements)

    @property
    def num_elements(self) -> int:
        """Elements inside."""
        return self.stop - self.start


@dataclass(frozen=True)
class Overlap:
    """A box that two extents share, as seen from the flat elements of each.

    source, target: where the box lies in either extent.
    """

    source: "View"
    target: "View"

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the shared elements from the flat elements of one extent to those of the other; dtypes may differ."""
        self.target.of(target).copy_(self.source.of(source))


@dataclass(frozen=True)
class View:
    """A strided part of flat elements: `index` into the run of `shape` that begins at `offset`."""

    offset: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    def of(self, flat: Tensor) -> Tensor:
        """The part itself."""
        return flat[self.offset : self.offset + math.prod(self.shape)].view(self.shape)[self.index]

    @property
    def span(self) -> range:
        """Flat elements from the first to the last of the part."""
        first = last = 0
        for extent, part in zip(self.shape, self.index, strict=True):
            first = first * extent + part.start
            last = last * extent + part.stop - 1
        return range(self.offset + first, self.offset + last + 1)


def overlaps(source: Extent, target: Extent) -> Iterator[Overlap]:
    """What two extents of one tensor share, as disjoint boxes."""
    for source_box, source_offset in _runs(source):
        for target_box, target_offset in _runs(target):
            shared = _intersection(source_box, target_box)
            if shared is not None:
                yield Overlap(_view(shared, source_box, source_offset), _view(shared, target_box, target_offset))


def tiling_problem(shape: Sequence[int], extents: Sequence[Extent]) -> str | None:
    """Why `extents` do not hold every element of a tensor exactly once; None when they do.

    Extents may share a box if their ranges are disjoint; different boxes may not meet.
    """
    ranges: dict[Box, list[Extent]] = {}
    for extent in extents:
        ranges.setdefault(extent.box, []).append(extent)
    boxes = list(ranges)
    for position, box in enumerate(boxes):
        if any(_intersection(box, other) is not None for other in boxes[:position]):
            return "two parts hold the same elements"
        members = sorted(ranges[box], key=lambda extent: extent.start)
        if any(after.start < before.stop for before, after in itertools.pairwise(members)):
            return "two parts hold the same elements"
    held, wanted = sum(extent.num_elements for extent in extents), math.prod(shape)
    return None if held == wanted else f"its parts hold {held} of {wanted} elements"


def _runs(extent: Extent) -> Iterator[tuple[Box, int]]:
    """The extent as boxes in global coordinates, each contiguous, with its offset from the extent's first element."""
    offset = 0
    for starts, stops in _row_major_runs(extent.box.shape, extent.start, extent.stop):
        run = Box(
            tuple(base + start for base, start in zip(extent.box.starts, starts, strict=True)),
            tuple(base + stop for base, stop in zip(extent.box.starts, stops, strict=True)),
        )
        yield run, offset
        offset += run.num_elements


def _row_major_runs(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (starts, stops) that cover elements start..stop of `shape` in order: part of a row, whole rows, part."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield (0,) * len(shape), shape
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _in_row(last, inner, start - last * row, stop - last * row)
        return
    yield from _in_row(first - 1, inner, start - (first - 1) * row, row if start % row else 0)
    if first < last:
        yield (first, *(0,) * len(inner)), (last, *inner)
    yield from _in_row(last, inner, 0, stop % row)


def _in_row(
    index: int, inner: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for starts, stops in _row_major_runs(inner, start, stop):
        yield (index, *starts), (index + 1, *stops)


def _intersection(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one.starts, other.starts))
    stops = tuple(map(min, one.stops, other.stops))
    return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None


def _view(shared: Box, run: Box, offset: int) -> View:
    index = tuple(
        slice(start - base, stop - base)
        for start, stop, base in zip(shared.starts, shared.stops, run.starts, strict=True)
    )
    return View(offset, run.shape, index)
