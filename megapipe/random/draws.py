"""Random draws for one numbered item: the same wherever, whenever and in whatever company the item is made."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_BLOCK = 256
_WORD = 64


class Draws:
    """A stream of draws of its own for every (seed, purpose, number).

    Philox4x64-10 (Salmon et al., SC 2011) with the seed and a hash of the purpose as key and the number in the
    counter's upper half. What is drawn are functions of whole words, so that no version of numpy changes them.

    seed, number: at least 0, below 2**64.
    """

    def __init__(self, seed: int, purpose: str, number: int) -> None:
        digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
        key = np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)
        counter = np.array([0, 0, number, 0], dtype=np.uint64)
        self._philox = np.random.Philox(key=key, counter=counter)
        self._block: list[int] = []

    def words(self, count: int) -> Words:
        """Uniform 64-bit words, uint64 [count]."""
        found: Words = self._philox.random_raw(count)
        return found

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound - 1, each as likely but for a part in 2**64 / bound."""
        return self._next() * bound >> _WORD

    def chance(self, probability: float) -> bool:
        """True with this probability, at least 0 and at most 1."""
        return self._next() < probability * 2.0**_WORD

    def heads(self, tosses: int) -> int:
        """How many of so many tosses of a fair coin show heads."""
        words = (self._next() for _ in range(-(-tosses // _WORD)))
        left = [min(_WORD, tosses - start) for start in range(0, tosses, _WORD)]
        return sum((word & ((1 << bits) - 1)).bit_count() for word, bits in zip(words, left, strict=True))

    def fractions(self, count: int) -> NDArray[np.float64]:
        """Multiples of 2**-53 in [0, 1), float64 [count]."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)

    def order(self, count: int) -> NDArray[np.int64]:
        """The numbers 0 to count - 1 in random order, int64 [count]."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)

    def _next(self) -> int:
        if not self._block:
            self._block = self.words(_BLOCK)[::-1].tolist()
        return self._block.pop()
