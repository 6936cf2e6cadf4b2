import math

import numpy as np
import pytest
from numpy.typing import NDArray

from megapipe.random.bits import normals


def random_words(count: int, seed: int = 7) -> NDArray[np.uint64]:
    return np.random.Philox(key=seed).random_raw(count)


def ks_distance(sample: NDArray[np.float64]) -> float:
    """Kolmogorov and Smirnov's distance from the standard normal, times sqrt(n)."""
    ordered = np.sort(sample)
    expected = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in ordered])
    ranks = np.arange(len(ordered))
    distance = max(np.max(expected - ranks / len(ordered)), np.max((ranks + 1) / len(ordered) - expected))
    return float(distance * math.sqrt(len(ordered)))


def test_equals_box_and_muller_as_the_textbook_writes_it() -> None:
    words = random_words(1 << 14)
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


def test_distribution_is_normal() -> None:
    sample = normals(random_words(400_000))
    count = len(sample)
    assert ks_distance(sample) < 1.95 < ks_distance(sample * 1.01)  # exceeded by one sample in a thousand
    assert abs(sample.mean()) < 3.5 / math.sqrt(count)
    assert abs(sample.var() - 1) < 3.5 * math.sqrt(2 / count)
    assert abs((sample**3).mean()) < 3.5 * math.sqrt(15 / count)
    assert abs((sample**4).mean() - 3) < 3.5 * math.sqrt(96 / count)


def test_neighbours_are_independent() -> None:
    sample = normals(random_words(400_000))
    for lag in range(1, 9):
        left, right = sample[:-lag], sample[lag:]
        limit = 3.5 / math.sqrt(len(left))
        assert abs(np.corrcoef(left, right)[0, 1]) < limit, lag
        assert abs(np.corrcoef(left**2, right**2)[0, 1]) < limit, lag
