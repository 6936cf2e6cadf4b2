"""Random choices for data: keyed permutations, and draws for one numbered item.

A permutation of [0, n) is the order of samples as a function of the key. Up to `LARGEST_TABLE` elements are sorted by
a keyed hash, and the result is stored. A larger permutation is computed position by position and not stored. Position
`i` passes through an alternating Feistel network over Z_a x Z_b, a = ceil(sqrt(n)) and b = ceil(n / a), with addition
in place of exclusive-or; a result outside [0, n) passes through it again until it falls inside (cycle walking), which
keeps the map a bijection. Because a * b - n < a, a second pass is needed with probability below 1 / sqrt(n). Source:
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

UnsignedArray = npt.NDArray[np.uint64]

LARGEST_TABLE = 4096
"""Largest size of a permutation that is stored as a table."""
FEW = 8
"""Largest number of positions for which Python's integers are faster than numpy's arrays."""
LARGEST_SIZE = 2**62
_ROUNDS = 8
_MASK = 2**64 - 1
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class KeyedPermutation:
    """A bijection of [0, size) chosen by a key of integers, in constant time and memory.

    `permutation(positions)` maps an array of any shape, `permutation[i]` one position; both give the same values on
    every machine. Different keys give independent orders: pass for example (seed, epoch).

    Raises ValueError for a size below 1 or above 2**62, and IndexError for a position outside [0, size).
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 1 <= size <= LARGEST_SIZE:
            raise ValueError(f"a permutation needs between 1 and 2**62 elements, not {size}")
        self.size = size
        self._round_keys = _expand_key(key)
        self._few_round_keys: list[int] = self._round_keys.tolist()
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._table = self._sorted_table() if size <= LARGEST_TABLE else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        return int(self(np.asarray([position]))[0])

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the images of `positions` (integers, any shape), as int64 of the same shape."""
        requested = np.asarray(positions, dtype=np.int64)
        if requested.size and (requested.min() < 0 or requested.max() >= self.size):
            raise IndexError(f"positions {requested.min()} to {requested.max()} reach outside [0, {self.size})")
        if self._table is not None:
            return self._table[requested]
        if requested.size <= FEW:
            images = np.array([self._image(position) for position in requested.reshape(-1).tolist()], dtype=np.int64)
            return images.reshape(requested.shape)
        words = self._network(requested.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(words >= self.size)
        while outside.size:
            words[outside] = self._network(words[outside])
            outside = outside[words[outside] >= self.size]
        return words.astype(np.int64).reshape(requested.shape)

    def _network(self, values: UnsignedArray) -> UnsignedArray:
        """Run one pass over Z_rows x Z_columns: [m] -> [m], each value below rows * columns."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = np.divmod(values, columns)
        for index in range(0, _ROUNDS, 2):
            left = (left + _mix(right + self._round_keys[index]) % rows) % rows
            right = (right + _mix(left + self._round_keys[index + 1]) % columns) % columns
        return left * columns + right

    def _image(self, position: int) -> int:
        """Return the image of one position, cycle walking included, in Python's integers."""
        rows, columns = self._rows, self._columns
        while True:
            left, right = divmod(position, columns)
            for index in range(0, _ROUNDS, 2):
                left = (left + _mixed(right + self._few_round_keys[index]) % rows) % rows
                right = (right + _mixed(left + self._few_round_keys[index + 1]) % columns) % columns
            position = left * columns + right
            if position < self.size:
                return position

    def _sorted_table(self) -> npt.NDArray[np.int64]:
        counters = np.arange(self.size, dtype=np.uint64) * _GOLDEN_GAMMA
        # Both steps are bijections of 64 bits, so no two hashes are equal, and the order has no ties.
        hashes = _mix(_mix(counters + self._round_keys[0]) ^ self._round_keys[1])
        return np.argsort(hashes).astype(np.int64)


def _expand_key(key: tuple[int, ...]) -> UnsignedArray:
    """Return [_ROUNDS] independent 64-bit words from integers of any sign and size."""
    digest = hashlib.blake2b(",".join(str(int(part)) for part in key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(words: UnsignedArray) -> UnsignedArray:
    """Apply the finaliser of SplitMix64, a bijection of 64 bits (Steele, Lea and Flood, OOPSLA 2014, figure 16)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mixed(word: int) -> int:
    """Return `_mix` of one word, taken modulo 2**64."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


Words = NDArray[np.uint64]

_BLOCK = 256
_WORD = 64


class Draws:
    """A separate stream of random draws for every (seed, purpose, number).

    Philox4x64-10 (Salmon et al., SC 2011) with the seed and a hash of the purpose as key and the number in the
    counter's upper half. All draws are functions of whole words, so that no version of numpy changes them.

    seed, number: at least 0, below 2**64.
    """

    def __init__(self, seed: int, purpose: str, number: int) -> None:
        digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
        key = np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)
        counter = np.array([0, 0, number, 0], dtype=np.uint64)
        self._philox = np.random.Philox(key=key, counter=counter)
        self._block: list[int] = []

    def words(self, count: int) -> Words:
        """Return uniform 64-bit words, uint64 [count]."""
        words: Words = self._philox.random_raw(count)
        return words

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to bound - 1; their probabilities differ by at most one part in 2**64 /
        bound."""
        return self._next() * bound >> _WORD

    def chance(self, probability: float) -> bool:
        """Return True with this probability, at least 0 and at most 1."""
        return self._next() < probability * 2.0**_WORD

    def heads(self, tosses: int) -> int:
        """Return the number of heads in `tosses` tosses of a fair coin."""
        words = (self._next() for _ in range(-(-tosses // _WORD)))
        left = [min(_WORD, tosses - start) for start in range(0, tosses, _WORD)]
        return sum((word & ((1 << bits) - 1)).bit_count() for word, bits in zip(words, left, strict=True))

    def fractions(self, count: int) -> NDArray[np.float64]:
        """Return uniform multiples of 2**-53 in [0, 1), float64 [count]."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)

    def order(self, count: int) -> NDArray[np.int64]:
        """Return the numbers 0 to count - 1 in random order, int64 [count]."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)

    def _next(self) -> int:
        if not self._block:
            self._block = self.words(_BLOCK)[::-1].tolist()
        return self._block.pop()
