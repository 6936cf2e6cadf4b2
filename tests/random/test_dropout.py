import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megapipe.random.bits import dropout_bits, finalize, keep_threshold

WORD = 0xFFFFFFFF
PINNED = [2536273800, 3781130324, 2866072478, 203045473, 2276933204, 3489851773, 2775292445, 1225155172]


def finalize_integer(word: int) -> int:
    """The finalizer in Python's own integers."""
    word ^= word >> 16
    word = word * 0x85EBCA6B & WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def bits_of_one(seed: int, ordinal: int, site: int, token: int, channel: int) -> int:
    """The definition, one word at a time."""
    key = finalize_integer(seed & WORD ^ 0x6D656761)
    for word in (seed >> 32, ordinal & WORD, ordinal >> 32, site * 0x9E3779B1 & WORD):
        key = finalize_integer(key ^ word)
    row = finalize_integer(key ^ token * 0x85EBCA77 & WORD)
    return finalize_integer(row ^ channel * 0x9E3779B9 & WORD)


long_word = st.integers(0, 2**64 - 1)
word = st.integers(0, WORD)


def test_the_finalizer_is_murmurhash3s() -> None:
    """MurmurHash3_x86_32 of the empty string is the finalizer of its seed; published for seeds 0, 1, 2**32 - 1."""
    hashes = finalize(np.array([0, 1, WORD], dtype=np.uint32))
    assert hashes.tolist() == [0, 0x514E28B7, 0x81F16F39]


@settings(max_examples=100, deadline=None)
@given(
    long_word,
    st.lists(long_word, min_size=1, max_size=3),
    word,
    st.lists(word, min_size=1, max_size=3),
    st.lists(word, min_size=1, max_size=3),
)
def test_every_word_equals_the_definition(
    seed: int, ordinals: list[int], site: int, tokens: list[int], channels: list[int]
) -> None:
    bits = dropout_bits(seed, np.array(ordinals, dtype=np.uint64), site, tokens, channels)
    assert bits.dtype == np.uint32
    assert bits.shape == (len(ordinals), len(tokens), len(channels))
    for (b, s, c), value in np.ndenumerate(bits):
        assert int(value) == bits_of_one(seed, ordinals[b], site, tokens[s], channels[c])


def test_bits_never_change_between_versions() -> None:
    """Pinned: a change here changes every run with dropout, and parts it from the kernels."""
    bits = dropout_bits(0x0123456789ABCDEF, [0, 2**32 + 5], 3, [0, 1023], [0, 4095])
    assert bits.reshape(-1).tolist() == PINNED


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_keep_rate(probability: float) -> None:
    bits = dropout_bits(11, range(8), 2, range(512), range(768))
    kept = (bits >= keep_threshold(probability)).mean()
    assert abs(kept - (1 - probability)) <= 3.5 * math.sqrt(probability * (1 - probability) / bits.size)


def chi_square(words: NDArray[np.uint32], shift: int) -> float:
    """How far eight bits of the words, from `shift` on, are from uniform; in standard deviations, 255 degrees."""
    counts = np.bincount((words.reshape(-1) >> np.uint32(shift)) & np.uint32(255), minlength=256)
    expected = words.size / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / math.sqrt(2 * 255))


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_words_are_uniform(seed: int) -> None:
    words = dropout_bits(seed, range(4), 1, range(512), range(512))
    assert all(abs(chi_square(words, shift)) < 4.5 for shift in (0, 8, 16, 24))


def test_rows_samples_and_channels_keep_the_right_share_each() -> None:
    """A mask may be right on average and yet starve one row: the worst line of each axis stays near the mean."""
    kept = dropout_bits(3, range(256), 7, range(256), range(256)) >= keep_threshold(0.1)
    for axes in itertools.combinations(range(3), 2):
        shares = kept.mean(axis=axes)
        deviation = math.sqrt(0.09 / 2**16)
        assert abs(shares - 0.9).max() < 5 * deviation
        assert shares.std() == pytest.approx(deviation, rel=0.2)
    lines = kept.mean(axis=2)
    assert lines.std() == pytest.approx(math.sqrt(0.09 / 256), rel=0.03)


def correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """In standard deviations of the correlation of independent numbers."""
    return float(np.corrcoef(left.reshape(-1), right.reshape(-1))[0, 1] * math.sqrt(left.size))


def test_neighbouring_samples_tokens_and_channels_are_uncorrelated() -> None:
    words = dropout_bits(5, range(64), 0, range(128), range(128)).astype(np.float64)
    dropped = (words < keep_threshold(0.1)).astype(np.float64)
    for values, axis, lag in itertools.product((words, dropped), range(3), (1, 2, 4, 8, 16)):
        length = values.shape[axis]
        left, right = values.take(range(length - lag), axis), values.take(range(lag, length), axis)
        assert abs(correlation(left, right)) < 4.5, (axis, lag)


@pytest.mark.parametrize("other", ["site", "seed", "next_seed_word", "next_ordinal_word"])
def test_sites_seeds_and_high_words_are_uncorrelated(other: str) -> None:
    tokens, channels = range(512), range(512)
    base = dropout_bits(5, [9], 0, tokens, channels).astype(np.float64)
    changed = {
        "site": dropout_bits(5, [9], 1, tokens, channels),
        "seed": dropout_bits(6, [9], 0, tokens, channels),
        "next_seed_word": dropout_bits(5 + 2**32, [9], 0, tokens, channels),
        "next_ordinal_word": dropout_bits(5, [9 + 2**32], 0, tokens, channels),
    }[other]
    assert abs(correlation(base, changed.astype(np.float64))) < 4.5


def test_one_flipped_input_bit_flips_half_of_the_output() -> None:
    base = dropout_bits(5, range(64), 3, range(64), range(64))
    for bit in range(12):
        for changed in (
            dropout_bits(5 ^ 1 << bit, range(64), 3, range(64), range(64)),
            dropout_bits(5, np.arange(64) ^ 1 << bit, 3, range(64), range(64)),
            dropout_bits(5, range(64), 3 ^ 1 << bit, range(64), range(64)),
            dropout_bits(5, range(64), 3, np.arange(64) ^ 1 << bit, range(64)),
            dropout_bits(5, range(64), 3, range(64), np.arange(64) ^ 1 << bit),
        ):
            flipped = np.unpackbits((base ^ changed).view(np.uint8)).mean()
            assert flipped == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, math.nan])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="dropout probability"):
        keep_threshold(probability)


def test_thresholds() -> None:
    assert keep_threshold(0.0) == 0
    assert keep_threshold(0.5) == 2**31
    assert keep_threshold(0.1) == 429496730
    assert keep_threshold(1 - 1e-16) == 2**32 - 1


def test_an_index_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"tokens -1 to 3 must be at least 0 and below 2\*\*32"):
        dropout_bits(0, [0], 0, [-1, 3], [0])
    with pytest.raises(ValueError, match=r"channels .* below 2\*\*32"):
        dropout_bits(0, [0], 0, [0], [2**32])
    with pytest.raises(ValueError, match=r"seed .* below 2\*\*64"):
        dropout_bits(2**64, [0], 0, [0], [0])
