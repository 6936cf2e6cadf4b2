"""Geometry of chunks: any parts into any parts, compared with plain indexing of the whole tensor."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.checkpoint.shards import Extent, overlaps, tiling_problem
from megapipe.spec.parameters import Box


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def elements(whole: torch.Tensor, extent: Extent) -> torch.Tensor:
    """Return the elements of an extent by indexing."""
    index = tuple(slice(start, stop) for start, stop in zip(extent.box.starts, extent.box.stops, strict=True))
    return whole[index].reshape(-1)[extent.start : extent.stop].clone()


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Extent]:
    """A tensor cut into a grid of boxes, some of which are cut again into ranges."""
    cuts = []
    for length in shape:
        inner = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=2, unique=True)) if length > 1 else []
        cuts.append([0, *sorted(inner), length])
    extents = []
    for corner in itertools.product(*[list(itertools.pairwise(edges)) for edges in cuts]):
        box = Box(tuple(start for start, _ in corner), tuple(stop for _, stop in corner))
        inner = draw(st.lists(st.integers(0, box.num_elements), max_size=2))
        extents += [Extent(box, a, b) for a, b in itertools.pairwise([0, *sorted(inner), box.num_elements]) if a < b]
    return extents


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Extent], list[Extent]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return shape, draw(tilings(shape)), draw(tilings(shape))


@given(cases())
def test_any_parts_into_any_parts(case: tuple[tuple[int, ...], list[Extent], list[Extent]]) -> None:
    shape, sources, targets = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for target in targets:
        received = torch.full((target.num_elements,), -1)
        for source in sources:
            flat = elements(whole, source)
            for overlap in overlaps(source, target):
                assert (overlap.target.of(received) == -1).all(), "two overlaps fill one element"
                overlap.copy(flat, received)
                span = overlap.source.span
                touched = overlap.source.of(torch.arange(flat.numel()))
                assert (span.start, span.stop) == (int(touched.min()), int(touched.max()) + 1)
        assert torch.equal(received, elements(whole, target))


@given(cases(), st.data())
def test_holes_and_overlaps_are_no_tiling(
    case: tuple[tuple[int, ...], list[Extent], list[Extent]], data: st.DataObject
) -> None:
    shape, extents, others = case
    assert tiling_problem(shape, extents) is None
    position = data.draw(st.integers(0, len(extents) - 1))
    missing = extents[:position] + extents[position + 1 :]
    assert "hold" in (tiling_problem(shape, missing) or "")
    assert "same elements" in (tiling_problem(shape, [*missing, extents[position], others[0]]) or "")


def test_equal_counts_do_not_hide_a_hole() -> None:
    box = whole_box((4,))
    assert tiling_problem((4,), [Extent(box, 0, 2), Extent(box, 1, 3)]) is not None


def test_one_whole_shard_is_copied_in_one_piece() -> None:
    shape = (4, 6)
    (overlap,) = overlaps(Extent.whole(whole_box(shape)), Extent.whole(Box((0, 2), (4, 4))))
    assert overlap.source.shape == shape
    assert overlap.target.shape == (4, 2)
