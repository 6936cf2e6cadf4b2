"""Shards that cut no matrix that fits in one: nothing overlaps, and the padding keeps within its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layout.units import place
from megapipe.parallel.segments import SegmentTable
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, Init, ParameterSpec


def spec_of(name: str, size: int, kind: str) -> ParameterSpec:
    matrix = kind == "matrix"
    shape = (size, 3) if matrix else (size,)
    return ParameterSpec(name, shape, None, Init("zeros"), decay=kind != "undecayed", matrix=matrix)


@given(
    parameters=st.lists(
        st.tuples(st.integers(1, 3000), st.sampled_from(["matrix", "decayed", "undecayed"])), max_size=14
    ),
    count=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_matrices_are_whole_and_shards_equal(parameters: list[tuple[int, str]], count: int) -> None:
    specs = [spec_of(f"p{number}", size, kind) for number, (size, kind) in enumerate(parameters)]
    placement = place(specs, count)
    table = SegmentTable(specs, num_shards=count, whole_matrices=True)
    assert placement.shard_size % SEGMENT_ALIGNMENT == 0
    assert table.num_elements == placement.num_elements == count * placement.shard_size
    aligned = {spec.name: -(-spec.num_elements // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT for spec in specs}
    total, longest = sum(aligned.values()), 0
    end = 0
    for segment in sorted(table, key=lambda segment: segment.start):
        assert segment.start == placement.starts[segment.spec.name]
        assert segment.start >= end
        assert segment.start % SEGMENT_ALIGNMENT == 0
        end = segment.stop
        kind = table.matrices if segment.spec.matrix else table.decayed if segment.spec.decay else table.undecayed
        assert kind.start <= segment.start < segment.stop <= kind.stop
        shards = {segment.start // placement.shard_size, (segment.stop - 1) // placement.shard_size}
        assert (segment.spec.name in table.cut) == (segment.spec.matrix and len(shards) > 1)
        if segment.spec.matrix and aligned[segment.spec.name] * count <= total:
            assert segment.spec.name not in table.cut
            longest = max(longest, aligned[segment.spec.name])
    assert end <= placement.num_elements
    assert placement.num_elements <= total + count * (longest + SEGMENT_ALIGNMENT) <= 2 * total + 64 * count
    inside = [placement.elementwise_in(shard) for shard in range(count)]
    assert sum(inside) == placement.elementwise == sum(aligned[s.name] for s in specs if not s.matrix)


BLOCK = {"qkv": 3, "output": 1, "up": 4, "down": 4}
"""Matrices of a GPT-2 block, in squares of its hidden size."""


@pytest.mark.parametrize(
    ("count", "shard", "cut"),
    [(1, 12, ""), (2, 7, ""), (3, 4, ""), (4, 3, "up down"), (6, 2, "qkv up down"), (12, 1, "qkv up down")],
)
def test_a_block_of_gpt2(count: int, shard: int, cut: str) -> None:
    """By hand: over two ranks 4 + 3 squares and 4 + 1; from four on what is longer than 12 / n squares is cut."""
    square = 64
    specs = [ParameterSpec(n, (size, square), None, Init("zeros"), True, True) for n, size in BLOCK.items()]
    table = place(specs, count)
    assert (table.shard_size, table.cut) == (shard * square, set(cut.split()))
    assert not cut or table.num_elements == 12 * square
