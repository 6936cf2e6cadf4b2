"""The random words of `megapipe.random.dropout` in Triton, and the decision that they make."""

import triton
import triton.language as tl

from megapipe.random.dropout import CHANNEL, keep_threshold

_FIRST, _SECOND, _CHANNEL, _TOP = (tl.constexpr(word) for word in (0x85EBCA6B, 0xC2B2AE35, CHANNEL, 1 << 31))


def signed_threshold(probability: float) -> int:
    """The least word of kept elements, its top bit flipped: as signed words, flipped ones keep their order."""
    return keep_threshold(probability) - (1 << 31)


@triton.jit
def finalize(word):
    """`megapipe.random.dropout.finalize` on uint32 words."""
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 13)) * _SECOND
    return word ^ (word >> 16)


@triton.jit
def kept(keys, channels, threshold):
    """Whether elements stay. keys (of tokens) and channels, both int32, broadcast; threshold: `signed_threshold`."""
    words = finalize(keys.to(tl.uint32, bitcast=True) ^ (channels.to(tl.uint32, bitcast=True) * _CHANNEL))
    return (words ^ _TOP).to(tl.int32, bitcast=True) >= threshold
