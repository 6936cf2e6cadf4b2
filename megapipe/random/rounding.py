"""Random words for stochastic rounding: functions of the seed, the global name, the element and the update alone.

The mixer is that of `megapipe.random.dropout`; this is the reference that torch repeats.
"""

import hashlib

import numpy as np
from numpy.typing import ArrayLike

from megapipe.random.dropout import CHANNEL, TOKEN, WORD, Words, finalize

ROUNDING = 0x726F756E
"""Keeps these words apart from those of dropout."""


def rounding_key(seed: int, name: str, update: int) -> int:
    """The 32-bit key of one parameter at one update.

    seed: below 2**64. name: global. update: number of the parameter's update, below 2**32.
    Raises ValueError for a number out of range.
    """
    if not 0 <= seed < 1 << 64 or not 0 <= update < 1 << 32:
        raise ValueError(f"seed {seed} must be at least 0 and below 2**64, update {update} below 2**32")
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    key = np.array([ROUNDING], np.uint32)
    for half in (seed & WORD, seed >> 32, digest & WORD, digest >> 32, update):
        key = finalize(key ^ np.uint32(half))
    return int(key[0])


def rounding_words(key: int, elements: ArrayLike) -> Words:
    """Random words of elements, told by their flat (row-major) global indices.

    With f = `finalize` and low and high the halves of an index: f(f(key ^ low * CHANNEL) ^ high * TOKEN).
    """
    indices = np.atleast_1d(np.asarray(elements)).astype(np.uint64)
    low, high = (indices & np.uint64(WORD)).astype(np.uint32), (indices >> np.uint64(32)).astype(np.uint32)
    return finalize(finalize(np.uint32(key) ^ low * np.uint32(CHANNEL)) ^ high * np.uint32(TOKEN))
