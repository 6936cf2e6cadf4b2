"""Initial weights as a function of only the seed, the global name and the global index.

Whatever part of a tensor a rank owns, it holds the values that the whole tensor has there, bit for bit, on every
machine. Random words: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Standard normal numbers have the same bits on every machine: Box and Muller's transform (1958) in float64, built only
from `+ - * /` and sqrt. IEEE 754 defines how these five are rounded, whereas the log, sin and cos of a C library or of
numpy's vector units differ in the last bit between processors.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
EXPONENT_OF_ONE = np.uint64(0x3FF) << np.uint64(52)
SIGN = np.uint64(1) << np.uint64(63)

# Series in the square of the argument, highest power first; the first term left out is below 1e-14 of the sum.
ARTANH = tuple(1 / (2 * k + 1) for k in reversed(range(9)))
SINE = tuple((-1) ** k / math.factorial(2 * k + 1) for k in reversed(range(8)))
COSINE = tuple((-1) ** k / math.factorial(2 * k) for k in reversed(range(9)))


def normals(words: Words) -> Floats:
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


def _key(name: str, seed: int) -> Words:
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


def _fill_normal(values: NDArray[Any], runs: Iterator[tuple[int, int]], key: Words, std: float) -> None:
    """Write the normal numbers of the runs, one after the other.

    The words of several short runs are gathered first and transformed together: numpy is slow on small arrays.
    """
    generator = np.random.Philox(key=key, counter=0)
    counter = position = gathered = 0
    words: list[Words] = []
    spans: list[tuple[int, int]] = []  # of each run within the gathered words
    for start, stop in runs:
        first, last = start // WORDS_PER_COUNTER, -(-stop // WORDS_PER_COUNTER)
        generator.advance((first - counter) % COUNTERS)
        words.append(generator.random_raw(WORDS_PER_COUNTER * (last - first)))
        counter = last
        begin = gathered + start - WORDS_PER_COUNTER * first
        spans.append((begin, begin + stop - start))
        gathered += len(words[-1])
        if gathered >= BLOCK:
            position = _write(values, position, words, spans, std)
            gathered = 0
    _write(values, position, words, spans, std)


def _write(values: NDArray[Any], position: int, words: list[Words], spans: list[tuple[int, int]], std: float) -> int:
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
