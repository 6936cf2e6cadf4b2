import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.random import bits
from megapipe.random.bits import fill_box, normals
from megapipe.spec.parameters import Box, Init

NORMAL = Init("normal", 0.02)
PINNED = [
    "-0x1.667dc441a76fdp-2",
    "0x1.688d79e784868p-1",
    "0x1.052216f49fd0dp-7",
    "-0x1.178e5c03382a2p-1",
    "-0x1.f8d8579b191acp-1",
    "0x1.6ca103ecee02cp-1",
]


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes(), st.sampled_from([3, 16, 1 << 15]), st.integers(0, 2**64 - 1))
def test_any_box_equals_its_part_of_the_whole(case: tuple[tuple[int, ...], Box], block: int, seed: int) -> None:
    shape, box = case
    full = fill_box("some.weight", shape, whole(shape), NORMAL, seed)
    with patch.object(bits, "BLOCK", block):
        part = fill_box("some.weight", shape, box, NORMAL, seed)
    assert part.dtype == np.float32
    assert part.shape == box.shape
    assert part.tobytes() == np.ascontiguousarray(full[inside(box)]).tobytes()


def test_values_never_change_between_versions() -> None:
    """Pinned: a change here changes the start of every training run."""
    values = fill_box("embedding.word.weight", (2, 3), whole((2, 3)), Init("normal", 1.0), 1234, np.float64)
    assert [value.hex() for value in values.reshape(-1).tolist()] == PINNED


def test_standard_deviation_and_mean() -> None:
    values = fill_box("w", (1000, 1000), whole((1000, 1000)), NORMAL, 9, np.float64)
    assert values.std() == pytest.approx(0.02, rel=0.003)
    assert abs(values.mean()) < 3.5 * 0.02 / 1000
    assert abs(values.mean(axis=0)).max() < 5 * 0.02 / math.sqrt(1000)
    assert abs(values.mean(axis=1)).max() < 5 * 0.02 / math.sqrt(1000)


def test_names_and_seeds_give_independent_tensors() -> None:
    shape = (100_000,)
    names = ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "blocks.10.mlp.up.weight"]
    tensors = [fill_box(name, shape, whole(shape), NORMAL, seed) for name in names for seed in (0, 1, 1 << 32)]
    for left, right in itertools.combinations(tensors, 2):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4.5 / math.sqrt(100_000)


def test_float32_is_the_float64_value_rounded_once() -> None:
    exact = fill_box("w", (999,), whole((999,)), NORMAL, 3, np.float64)
    rounded = fill_box("w", (999,), whole((999,)), NORMAL, 3)
    np.testing.assert_array_equal(rounded, exact.astype(np.float32))


def test_constants_and_empty_boxes() -> None:
    box = Box((1, 0), (3, 2))
    np.testing.assert_array_equal(fill_box("b", (4, 2), box, Init("zeros"), 0), np.zeros((2, 2)))
    np.testing.assert_array_equal(fill_box("n", (4, 2), box, Init("ones"), 0), np.ones((2, 2)))
    assert fill_box("w", (4, 2), Box((4, 0), (4, 2)), NORMAL, 0).shape == (0, 2)
    assert fill_box("w", (), Box((), ()), NORMAL, 0).shape == ()


@pytest.mark.parametrize(
    ("box", "seed", "message"),
    [
        (Box((0, 0), (5, 2)), 0, "not inside shape"),
        (Box((0,), (4,)), 0, "not inside shape"),
        (Box((2, 0), (1, 2)), 0, "not inside shape"),
        (Box((0, 0), (4, 2)), -1, "seed is -1"),
        (Box((0, 0), (4, 2)), 2**64, "seed is 18446744073709551616"),
    ],
)
def test_wrong_input_is_named(box: Box, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_box("w", (4, 2), box, NORMAL, seed)


def test_equals_box_and_muller_as_the_textbook_writes_it() -> None:
    words = np.random.Philox(key=7).random_raw(1 << 14)
    radius_word, angle_word = words[0::2], words[1::2]
    uniform = 1.0 - (radius_word >> np.uint64(12)).astype(np.float64) / 2**52
    eighth = ((angle_word >> np.uint64(12)).astype(np.float64) / 2**52) * (math.pi / 2)
    radius = np.sqrt(-2.0 * np.log(uniform))
    cosine = np.where(angle_word & np.uint64(1), -1.0, 1.0) * np.cos(eighth)
    sine = np.where(angle_word & np.uint64(2), -1.0, 1.0) * np.sin(eighth)
    expected = np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)
    np.testing.assert_allclose(normals(words), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("radius_word", [0, 1 << 12, 2**64 - 1])
@pytest.mark.parametrize("angle_word", [0, 1, 2, 3, 2**64 - 1])
def test_the_ends_of_the_unit_interval_give_finite_numbers(radius_word: int, angle_word: int) -> None:
    pair = normals(np.array([radius_word, angle_word], dtype=np.uint64))
    assert np.all(np.isfinite(pair))
    assert np.hypot(*pair) == pytest.approx(math.sqrt(-2 * math.log(1 - (radius_word >> 12) / 2**52)), abs=1e-7)
