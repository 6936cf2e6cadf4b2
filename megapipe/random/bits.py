"""Random numbers as functions of the seed and of global names and indices: dropout masks, rounding, initial weights.

All have the same bits on every machine, whatever part of a tensor a rank owns.

Dropout and rounding use 32-bit words by counter; this is their reference for torch and the GPU kernels. The generator
is a counter-based mixer: it runs one step of MurmurHash3's finalizer (Appleby) for each index. Everything is
arithmetic modulo 2**32 on unsigned words, so that numpy, torch, Triton and CUDA give the same bits.

Initial weights use the 64-bit words of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011) and Box and Muller's transform (1958) to standard normal numbers in float64, built only from `+ - * /` and sqrt.
IEEE 754 defines how these five are rounded, whereas the log, sin and cos of a C library or of numpy's vector units
differ in the last bit between processors.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Words = NDArray[np.uint32]

DOMAIN = 0x6D656761
# Odd numbers, so that a product with one of them is a bijection: two primes of xxHash, and 2**32 / golden ratio.
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


LongWords = NDArray[np.uint64]
Floats = NDArray[np.float64]

LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
EXPONENT_OF_ONE = np.uint64(0x3FF) << np.uint64(52)
SIGN = np.uint64(1) << np.uint64(63)

# Series in the square of the argument, highest power first; the first term left out is below 1e-14 of the sum.
ARTANH = tuple(1 / (2 * k + 1) for k in reversed(range(9)))
SINE = tuple((-1) ** k / math.factorial(2 * k + 1) for k in reversed(range(8)))
COSINE = tuple((-1) ** k / math.factorial(2 * k) for k in reversed(range(9)))


def normals(words: LongWords) -> Floats:
    """Return an independent standard normal number for each random word; the number of words must be even.

    Words 2i and 2i + 1 give numbers 2i and 2i + 1: the first word gives the radius, the second the angle. The top 52
    bits of a word are its position in the unit interval; the last two bits of an angle's word are its quadrant.
    Absolute values are below 8.5.
    """
    fractions = ((words >> np.uint64(12)) | EXPONENT_OF_ONE).view(np.float64)  # [1, 2)
    radius = np.sqrt(_minus_log(2.0 - fractions[0::2]))  # of the normal pair, over sqrt 2
    angle = (fractions[1::2] - 1.5) * (math.pi / 2)  # from the diagonal, within an eighth turn to either side
    square = angle * angle
    cosine = _polynomial(square, COSINE)
    sine = _polynomial(square, SINE) * angle
    quadrant = words[1::2]
    pairs = np.empty((len(radius), 2))
    np.multiply(radius, cosine - sine, out=pairs[:, 0])
    np.multiply(radius, cosine + sine, out=pairs[:, 1])
    signs = pairs.view(np.uint64)
    signs[:, 0] ^= (quadrant << np.uint64(63)) & SIGN
    signs[:, 1] ^= (quadrant << np.uint64(62)) & SIGN
    return pairs.reshape(-1)


def _minus_log(numbers: Floats) -> Floats:
    """Return -log(x) for x in (0, 1], to about 1e-15; never below 0."""
    mantissa, exponent = np.frexp(numbers)
    ratio = (mantissa - SQRT_HALF) / (mantissa + SQRT_HALF)  # log m = log sqrt(1/2) + 2 artanh(ratio)
    series = _polynomial(ratio * ratio, ARTANH) * ratio
    return np.maximum((0.5 - exponent) * LOG_2 - 2.0 * series, 0.0)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Evaluate a polynomial by Horner's rule; the coefficient of the highest power is first."""
    total = x * coefficients[0]
    total += coefficients[1]
    for coefficient in coefficients[2:]:
        total *= x
        total += coefficient
    return total


WORDS_PER_COUNTER = 4
COUNTERS = 1 << 256
BLOCK = 1 << 15
"""Elements computed at a time: the temporaries stay in the processor's cache."""


class BoxLike(Protocol):
    """A rectangular part of a global tensor: `starts[i] <= index[i] < stops[i]`."""

    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def stops(self) -> tuple[int, ...]: ...


class InitLike(Protocol):
    """`kind` is normal (with standard deviation `std`), zeros or ones."""

    @property
    def kind(self) -> str: ...
    @property
    def std(self) -> float: ...


def fill_box(
    name: str, shape: tuple[int, ...], box: BoxLike, init: InitLike, seed: int, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Return the initial values of a box of the tensor `name` of global `shape`, as an array of the box's shape.

    The element of flat (row-major) global index i is normal number i of the stream that the seed and the name key,
    times `init.std`, rounded from float64 to `dtype` once. Words 4k to 4k + 3 of the stream are Philox of counter
    k + 1, as numpy counts. Needs about 2 MB in addition to the result.

    Raises ValueError for a box that reaches outside the tensor, an unknown kind, or a seed outside 0 .. 2**64 - 1.
    """
    _check(name, shape, box, seed)
    box_shape = tuple(stop - start for start, stop in zip(box.starts, box.stops, strict=True))
    if init.kind == "zeros":
        return np.zeros(box_shape, dtype)
    if init.kind == "ones":
        return np.ones(box_shape, dtype)
    if init.kind != "normal":
        raise ValueError(f"{name}: init kind {init.kind!r} is unknown; use normal, zeros or ones")
    values = np.empty(math.prod(box_shape), dtype)
    if values.size:
        _fill_normal(values, _runs(shape, box), _key(name, seed), init.std)
    return values.reshape(box_shape)


def _check(name: str, shape: tuple[int, ...], box: BoxLike, seed: int) -> None:
    inside = len(box.starts) == len(box.stops) == len(shape) and all(
        0 <= start <= stop <= length for start, stop, length in zip(box.starts, box.stops, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{name}: box {box.starts} to {box.stops} is not inside shape {shape}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below 2**64")


def _key(name: str, seed: int) -> LongWords:
    """Return two words: the seed, and a hash of the name that is the same in all Python versions and processes."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)


def _runs(shape: tuple[int, ...], box: BoxLike) -> Iterator[tuple[int, int]]:
    """Yield the box's flat index ranges (start, stop) in order, each contiguous and at most BLOCK long."""
    lengths = list(zip(box.starts, box.stops, shape, strict=True))
    cut = max((axis for axis, (start, stop, length) in enumerate(lengths) if stop - start != length), default=0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if not shape:
        yield 0, 1
        return
    first, last = box.starts[cut] * strides[cut], box.stops[cut] * strides[cut]
    outer = [range(start, stop) for start, stop, _ in lengths[:cut]]
    for index in itertools.product(*outer):
        base = sum(i * stride for i, stride in zip(index, strides, strict=False))
        for start in range(base + first, base + last, BLOCK):
            yield start, min(start + BLOCK, base + last)


def _fill_normal(values: NDArray[Any], runs: Iterator[tuple[int, int]], key: LongWords, std: float) -> None:
    """Write the normal numbers of the runs, one after the other.

    The words of several short runs are gathered first and transformed together: numpy is slow on small arrays.
    """
    generator = np.random.Philox(key=key, counter=0)
    counter = position = gathered = 0
    words: list[LongWords] = []
    spans: list[tuple[int, int]] = []  # of each run within the gathered words
    for start, stop in runs:
        first, last = start // WORDS_PER_COUNTER, -(-stop // WORDS_PER_COUNTER)
        generator.advance((first - counter) % COUNTERS)
        words.append(generator.random_raw(WORDS_PER_COUNTER * (last - first)))
        counter = last
        span_start = gathered + start - WORDS_PER_COUNTER * first
        spans.append((span_start, span_start + stop - start))
        gathered += len(words[-1])
        if gathered >= BLOCK:
            position = _write(values, position, words, spans, std)
            gathered = 0
    _write(values, position, words, spans, std)


def _write(
    values: NDArray[Any], position: int, words: list[LongWords], spans: list[tuple[int, int]], std: float
) -> int:
    """Transform the gathered words, write their spans from `position` on, and empty both lists. Return the next
    position."""
    if words:
        numbers = normals(words[0] if len(words) == 1 else np.concatenate(words))
        numbers *= std
        for start, stop in spans:
            values[position : position + stop - start] = numbers[start:stop]
            position += stop - start
    words.clear()
    spans.clear()
    return position
