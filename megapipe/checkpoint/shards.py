"""Parts of tensors: their geometry, the overlap of two parts, and the parts in a rank's unit states."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapipe.parallel.groups import Group
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Box

WEIGHTS = "weights"
"""Kind of the newest weights. The kinds of moments are the names that the optimizer gives them."""


def earlier_weights(age: int) -> str:
    """Return the kind of the weights `age` versions before the newest, from which schedules with several versions
    resume."""
    return f"weights_before_{age}"


@dataclass(frozen=True)
class Extent:
    """Elements `start <= i < stop` of a box of a global tensor, in the box's row-major order.

    A tensor-parallel shard covers its whole box. A shard of a flat buffer is a range that may start and end inside a
    row.
    """

    box: Box
    start: int
    stop: int

    @classmethod
    def whole(cls, box: Box) -> "Extent":
        """Return the extent of the whole `box`."""
        return cls(box, 0, box.num_elements)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """Return the box of an index, a slice with start and stop for each axis. An empty index is the whole tensor."""
    whole = index or tuple(slice(0, length) for length in shape)
    return Box(tuple(part.start for part in whole), tuple(part.stop for part in whole))


@dataclass(frozen=True)
class Overlap:
    """A box that two extents have in common, as a view of the flat elements of each.

    source, target: the view of each extent's elements.
    """

    source: "View"
    target: "View"

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the common elements from the flat `source` to the flat `target`; dtypes may differ."""
        self.target.of(target).copy_(self.source.of(source))


@dataclass(frozen=True)
class View:
    """A strided part of flat elements: `index` into the array of `shape` that starts at `offset`."""

    offset: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor."""
        return flat[self.offset :][: math.prod(self.shape)].view(self.shape)[self.index]

    @property
    def span(self) -> range:
        """Range of flat elements from the first to the last of the part."""
        first = last = 0
        for extent, part in zip(self.shape, self.index, strict=True):
            first = first * extent + part.start
            last = last * extent + part.stop - 1
        return range(self.offset + first, self.offset + last + 1)


def overlaps(source: Extent, target: Extent) -> Iterator[Overlap]:
    """Yield the elements that two extents of one tensor have in common, as disjoint boxes."""
    for source_box, source_offset in _runs(source):
        for target_box, target_offset in _runs(target):
            shared = _intersection(source_box, target_box)
            if shared is not None:
                yield Overlap(_view(shared, source_box, source_offset), _view(shared, target_box, target_offset))


def tiling_problem(shape: Sequence[int], extents: Sequence[Extent]) -> str | None:
    """Return the reason why `extents` do not contain every element of a tensor exactly once; None if they do.

    Extents may share a box if their ranges are disjoint; different boxes must not overlap.
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
    held, total = sum(extent.num_elements for extent in extents), math.prod(shape)
    return None if held == total else f"its parts hold {held} of {total} elements"


def _runs(extent: Extent) -> Iterator[tuple[Box, int]]:
    """Yield the extent as contiguous boxes in global coordinates, each with its offset from the extent's first
    element."""
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
    """Yield boxes (starts, stops) that cover elements start..stop of `shape` in order: part of a row, whole rows,
    part."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield (0,) * len(shape), shape
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row
    if first > last:  # all elements are within one row
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


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that one rank stores, a part of its tensor-parallel shard, without padding."""

    state: UnitState
    segment: Segment

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.segment.spec.name

    @property
    def extent(self) -> Extent:
        """The elements of this part."""
        elements = self.state.held(self.segment)
        return Extent(self.segment.box, elements.start, elements.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a file: the shape of the box, or one dimension if the shard is only a part of the box."""
        extent = self.extent
        whole = extent == Extent.whole(extent.box)
        return extent.box.shape if whole else (extent.num_elements,)

    def of(self, buffer: Tensor) -> Tensor:
        """Return this part of a state's buffer of all parameters, in one dimension."""
        return self.state.in_shard(buffer, self.segment)


def shards_of(states: Iterable[UnitState]) -> Iterator[Shard]:
    """Yield all shards of a rank, except those that contain only padding."""
    for state in states:
        for segment in state.table:
            if state.held(segment):
                yield Shard(state, segment)


def buffers(state: UnitState) -> dict[str, Tensor]:
    """Return this rank's flat buffers of a unit that a checkpoint stores, by kind."""
    copies = len(state.weights)
    earlier = {earlier_weights(age): state.weight_shards[(state.newest - age) % copies] for age in range(1, copies)}
    return {WEIGHTS: state.master, **earlier, **state.moments}


def parts_of(shard: Shard) -> dict[str, Tensor]:
    """Return the shard's elements in each buffer that a checkpoint stores, in one dimension, by kind."""
    parts = {}
    place = shard.state.place(shard.segment)
    for kind, buffer in buffers(shard.state).items():
        first = shard.state.moment_starts.get(kind, 0)
        if place.start >= first and place.stop - first <= buffer.numel():
            parts[kind] = buffer[place.start - first : place.stop - first]
    return parts


def shards_to_write(states: Sequence[UnitState], world: Group) -> list[Shard]:
    """Return the shards that this rank writes. If several ranks have the same shard, the rank with the least data to
    write writes it.

    Replicas have equal bits: data-parallel copies, parameters that tensor ranks do not shard, and tied weights of two
    stages. Distributing the writes uses the disks and network cards of all hosts. All ranks compute the same plan.
    """
    mine = list(shards_of(states))
    holders: dict[tuple[str, Extent], list[int]] = {}
    for rank, shard_keys in enumerate(world.all_gather_object([(shard.name, shard.extent) for shard in mine])):
        for key in shard_keys:
            holders.setdefault(key, []).append(rank)
    num_assigned = [0] * world.size
    writers = {}
    for key, ranks in sorted(holders.items(), key=lambda item: -item[0][1].num_elements):
        writers[key] = min(ranks, key=lambda rank: num_assigned[rank])
        num_assigned[writers[key]] += key[1].num_elements
    return [shard for shard in mine if writers[shard.name, shard.extent] == world.rank]
