"""Number formats of PTX on numpy arrays, rounded as the instructions round."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "b8": np.uint8,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
}
"""PTX type -> numpy's. bf16 and pairs of 16-bit floats are stored as their bits."""

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NAN16 = np.uint16(0x7FFF)
"""Bits of the NaN that instructions give, in fp16 and bf16."""


def bits_of(x: Array) -> Array:
    """The same bits as unsigned integers; predicates stay."""
    return x if x.dtype == np.bool_ else x.view(UNSIGNED[x.dtype.itemsize])


def from_bf16(x: Array) -> Array:
    """fp32 of bf16 bits."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """bf16 bits of fp32 or fp64 numbers, rounded once, to the nearest even."""
    narrow = np.ascontiguousarray(x, np.float32)
    word = narrow.view(np.uint32)
    if x.dtype == np.float64:
        # Round to odd first, so that the second rounding sees whether anything was cut off.
        back = narrow.astype(np.float64)
        word = word - (np.abs(back) > np.abs(x)).astype(np.uint32)
        word = word | ((back != x) & ~np.isnan(x)).astype(np.uint32)
    word = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), NAN16, (word >> np.uint32(16)).astype(np.uint16))


def on_halves(function: Callable[..., Array], kind: str, *values: Array) -> Array:
    """A function of fp64 on 16-bit floats (`f16` or `bf16`). In fp64, sums and products of two are exact enough to be
    rounded once."""
    result = function(*((from_bf16(value) if kind == "bf16" else value).astype(np.float64) for value in values))
    return to_bf16(result) if kind == "bf16" else result.astype(np.float16)


def on_pairs(function: Callable[..., Array], kind: str, *pairs: Array) -> Array:
    """A function of 16-bit floats (`f16` or `bf16`) on both halves of 32-bit words."""
    halves = []
    for shift in (0, 16):
        parts = [(pair >> np.uint32(shift)).astype(np.uint16) for pair in pairs]
        result = function(*(part.view(TYPES[kind]) for part in parts))
        halves.append(bits_of(result).astype(np.uint32) << np.uint32(shift))
    return halves[0] | halves[1]


def fused32(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of fp32, rounded once. The product is exact in fp64; a sum that fp64 rounded onto the middle between
    two fp32 numbers is moved back to its side."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + addend)
    word = total.view(np.int64)
    middle = (word & 0x1FFFFFFF) == 0x10000000
    if middle.any():
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        step = np.where(lost == 0, 0, np.where((lost > 0) == (total > 0), 1, -1))
        total = (word + np.where(middle & np.isfinite(total), step, 0)).view(np.float64)
    return total.astype(np.float32)


def flushed(x: Array) -> Array:
    """fp32 numbers, subnormal ones replaced by a zero of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def maximum(x: Array, y: Array) -> Array:
    """Maximum of floats: -0 is below +0, a single NaN loses."""
    zero = np.where(np.signbit(x) & np.signbit(y), -0.0, 0.0).astype(x.dtype)
    return np.where((x == 0) & (y == 0), zero, np.fmax(x, y))


def inexact(value: Array, error: Array, seed: Array) -> Array:
    """Return fp32 numbers as far from fp64 values as `error` allows; the seed's bits choose the side."""
    hashed = bits_of(np.ascontiguousarray(seed)).astype(np.uint32) * np.uint32(0x9E3779B1)
    goal = np.where(error > 0, value + np.where(hashed >> np.uint32(31), 1.0, -1.0) * error, value)
    result = goal.astype(np.float32)
    rounded = result.astype(np.float64)
    # Rounding may have exceeded the error: the next number toward the value is taken then.
    beyond = (np.abs(rounded - value) > error) & (rounded != 0)
    step = np.where((rounded > value) == (rounded > 0), -1, 1) * beyond
    return (bits_of(result) + step.astype(np.uint32)).view(np.float32)
