"""Random words by counter, as functions of the seed and of global names and indices: dropout masks and rounding.

This is the reference for torch and the GPU kernels. The generator is a counter-based mixer of 32-bit words: it runs
one step of MurmurHash3's finalizer (Appleby) for each index. Everything is arithmetic modulo 2**32 on unsigned words,
so that numpy, torch, Triton and CUDA give the same bits.
"""

import hashlib
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint32]

DOMAIN = 0x6D656761
SITE = 0x9E3779B1
TOKEN = 0x85EBCA77
CHANNEL = 0x9E3779B9
WORD = 0xFFFFFFFF


def finalize(word: Words) -> Words:
    """Apply MurmurHash3's 32-bit finalizer: a bijection in which each input bit flips about half of the output."""
    word = word ^ (word >> np.uint32(16))
    word = word * np.uint32(0x85EBCA6B)
    word = word ^ (word >> np.uint32(13))
    word = word * np.uint32(0xC2B2AE35)
    return cast(Words, word ^ (word >> np.uint32(16)))


def dropout_bits(seed: int, ordinals: ArrayLike, site: int, tokens: ArrayLike, channels: ArrayLike) -> Words:
    """Return random words [b, s, c] for the samples `ordinals` [b], positions `tokens` [s] and `channels` [c].

    seed: below 2**64. ordinals: global ordinal of each sample in the run, below 2**64. site: number of the dropout
    in the model, below 2**32. tokens, channels: global indices below 2**32. Raises ValueError for a number out of
    range.

    With f = `finalize`, and low and high the halves of a 64-bit word:
    key = f(f(f(f(f(seed_low ^ DOMAIN) ^ seed_high) ^ ordinal_low) ^ ordinal_high) ^ site * SITE),
    bits = f(f(key ^ token * TOKEN) ^ channel * CHANNEL).
    The key has 32 bits, so two of a sample's n sites share their masks with probability n * n / 2**33.
    """
    seed_low, seed_high = _halves("seed", seed)
    ordinal_low, ordinal_high = _halves("ordinals", ordinals)
    key = finalize(finalize(seed_low ^ np.uint32(DOMAIN)) ^ seed_high)
    key = finalize(finalize(key ^ ordinal_low) ^ ordinal_high)
    key = finalize(key ^ _word("site", site) * np.uint32(SITE))
    row = finalize(key[:, None] ^ _word("tokens", tokens) * np.uint32(TOKEN))
    return finalize(row[:, :, None] ^ _word("channels", channels) * np.uint32(CHANNEL))


def keep_threshold(probability: float) -> int:
    """Return the smallest random word of a channel that is kept.

    probability: of dropping, at least 0 and below 1. Raises ValueError otherwise.
    """
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"dropout probability is {probability}; it must be at least 0 and below 1")
    return min(round(probability * 2**32), WORD)


def _halves(name: str, numbers: ArrayLike) -> tuple[Words, Words]:
    """Return the low and high 32 bits of `numbers`, one-dimensional."""
    values = _unsigned(name, numbers, 64)
    return (values & np.uint64(WORD)).astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)


def _word(name: str, numbers: ArrayLike) -> Words:
    return _unsigned(name, numbers, 32).astype(np.uint32)


def _unsigned(name: str, numbers: ArrayLike, bits: int) -> NDArray[np.uint64]:
    values = np.atleast_1d(np.asarray(numbers))
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < 1 << bits:
        raise ValueError(f"{name} {values.min()} to {values.max()} must be at least 0 and below 2**{bits}")
    return values.astype(np.uint64)


ROUNDING = 0x726F756E
"""Part of the key that makes these words differ from those of dropout."""


def rounding_key(seed: int, name: str, update: int) -> int:
    """Return the 32-bit key of one parameter at one update.

    seed: below 2**64. name: global name of the parameter. update: number of the parameter's update, below 2**32.
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
    """Return the random words of elements with these flat (row-major) global indices.

    With f = `finalize` and low and high the halves of an index: f(f(key ^ low * CHANNEL) ^ high * TOKEN).
    """
    indices = np.atleast_1d(np.asarray(elements)).astype(np.uint64)
    low, high = (indices & np.uint64(WORD)).astype(np.uint32), (indices >> np.uint64(32)).astype(np.uint32)
    return finalize(finalize(np.uint32(key) ^ low * np.uint32(CHANNEL)) ^ high * np.uint32(TOKEN))
