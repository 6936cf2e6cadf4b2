"""Standard normal numbers from random words, with the same bits on every machine.

Box and Muller's transform (1958) in float64, built from `+ - * /` and sqrt alone. IEEE 754 rounds these five
one way only, whereas the log, sin and cos of a C library or of numpy's vector units differ in the last bit between
processors.
"""

import math

import numpy as np
from numpy.typing import NDArray

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
    """As many independent standard normal numbers as there are random words; their number must be even.

    Words 2i and 2i + 1 give numbers 2i and 2i + 1: the first word the radius, the second the angle. The top 52 bits
    of a word are its position in the unit interval, the last two bits of an angle its quadrant. Absolute values are
    below 8.5.
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
    """-log(x) for x in (0, 1], to about 1e-15; never below 0."""
    mantissa, exponent = np.frexp(numbers)
    ratio = (mantissa - SQRT_HALF) / (mantissa + SQRT_HALF)  # log m = log sqrt(1/2) + 2 artanh(ratio)
    series = _polynomial(ratio * ratio, ARTANH) * ratio
    return np.maximum((0.5 - exponent) * LOG_2 - 2.0 * series, 0.0)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Horner's rule, highest power first."""
    total = x * coefficients[0]
    total += coefficients[1]
    for coefficient in coefficients[2:]:
        total *= x
        total += coefficient
    return total
