"""Bits of dropout masks: their definition word by word, and their statistics."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.random.bits import dropout_bits, finalize, keep_threshold
from tests.random.uniform import excess

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


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_words_are_uniform(seed: int) -> None:
    words = dropout_bits(seed, range(4), 1, range(512), range(512)).reshape(-1)
    for shift in (0, 8, 16, 24):
        eight_bits = (words >> np.uint32(shift)) & np.uint32(255)
        assert abs(excess(np.bincount(eight_bits, minlength=256))) < 4.5


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


def test_neighbouring_samples_tokens_and_channels_are_uncorrelated() -> None:
    words = dropout_bits(5, range(64), 0, range(128), range(128)).astype(np.float64)
    dropped = (words < keep_threshold(0.1)).astype(np.float64)
    for values, axis, lag in itertools.product((words, dropped), range(3), (1, 2, 4, 8, 16)):
        length = values.shape[axis]
        left, right = values.take(range(length - lag), axis), values.take(range(lag, length), axis)
        correlation = np.corrcoef(left.reshape(-1), right.reshape(-1))[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(left.size), (axis, lag)


def test_one_flipped_input_bit_flips_half_of_the_output() -> None:
    """Each output bit by itself, so that sites, seeds and high words are independent too."""
    base = dropout_bits(5, range(64), 3, range(64), range(64))
    for bit in (*range(12), 32):
        flips = [(1 << bit, 0, 0, 0, 0), (0, 1 << bit, 0, 0, 0)]
        if bit < 32:
            flips += [(0, 0, 1 << bit, 0, 0), (0, 0, 0, 1 << bit, 0), (0, 0, 0, 0, 1 << bit)]
        for seed, ordinal, site, token, channel in flips:
            numbers = np.arange(64)
            changed = dropout_bits(5 ^ seed, numbers ^ ordinal, 3 ^ site, numbers ^ token, numbers ^ channel)
            for output_bit in range(32):
                flipped = np.count_nonzero((base ^ changed) & np.uint32(1 << output_bit)) / base.size
                assert abs(flipped - 0.5) < 0.005


def test_thresholds_follow_the_probability() -> None:
    thresholds = {0.0: 0, 0.1: 429496730, 0.5: 2**31, 0.9: 3865470566, 1 - 1e-16: 2**32 - 1}
    assert {probability: keep_threshold(probability) for probability in thresholds} == thresholds


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *((keep_threshold, (probability,), "dropout probability") for probability in (-0.1, 1.0, 1.5, math.nan)),
        (dropout_bits, (0, [0], 0, [-1, 3], [0]), r"tokens -1 to 3 must be at least 0 and below 2\*\*32"),
        (dropout_bits, (0, [0], 0, [0], [2**32]), r"channels .* below 2\*\*32"),
        (dropout_bits, (2**64, [0], 0, [0], [0]), r"seed .* below 2\*\*64"),
    ],
)
def test_numbers_out_of_range_are_named(function: Callable[..., object], arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)
