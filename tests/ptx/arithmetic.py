"""Instructions that only compute: opcode -> (types of the operands, type of the result, function on numpy arrays).

Semantics: PTX ISA, the sections on integer, floating-point, comparison, logic, shift and conversion instructions.
Approximate instructions return a value at the far end of the error that the ISA documents for them, above or below it
as the operand's bits say, so that a kernel is not judged by better functions than a GPU has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from tests.ptx.numbers import (
    NAN16,
    TYPES,
    Array,
    bits_of,
    flushed,
    from_bf16,
    fused32,
    inexact,
    maximum,
    on_halves,
    on_pairs,
    to_bf16,
)

_HALVES = ("f16", "bf16")
_FLOATS = (*_HALVES, "f32", "f64")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_OF_FLOATS = frozenset({"rn", "full", "approx", "ftz"})
_OF_INTEGERS = {"mul": {"lo", "wide"}, "mad": {"lo", "wide"}}
"""Modifiers that are known; the type comes last."""


@dataclass(frozen=True)
class Operation:
    """operands, result: PTX types, as in `TYPES`. function: arrays of these types -> one of the type of the result."""

    operands: tuple[str, ...]
    result: str
    function: Callable[..., Array]


def _wider(kind: str) -> str:
    return f"{kind[0]}{16 * np.dtype(TYPES[kind]).itemsize}"


def _divided(x: Array, y: Array) -> Array:
    """Quotient toward zero; all bits set where y is 0, which PTX leaves open."""
    safe = np.where(y == 0, np.ones_like(y), y)
    return np.where(y == 0, ~np.zeros_like(x), (x - np.fmod(x, safe)) // safe)


def _remainder(x: Array, y: Array) -> Array:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, np.ones_like(y), y)))


def _shift(x: Array, count: Array, left: bool) -> Array:
    """Counts at or above the width leave 0, or the sign."""
    bits = 8 * x.dtype.itemsize
    within = np.minimum(count, np.uint32(bits - 1)).astype(x.dtype)
    moved = x << within if left else x >> within
    if not left and x.dtype.kind == "i":
        return moved
    return np.where(count >= bits, np.zeros_like(moved), moved)


def _extracted(x: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits from `position`, extended by zeros or by the field's sign."""
    wide = x.astype(np.int64) >> np.minimum(position & np.uint32(255), np.uint32(63))
    left = 64 - np.minimum(length & np.uint32(255), np.uint32(32)).astype(np.int64)
    field = wide << np.minimum(left, 63)
    if x.dtype.kind == "u":
        field = field.view(np.uint64)
    return np.where(left == 64, 0, field >> np.minimum(left, 63).astype(field.dtype)).astype(x.dtype)


def _permuted(x: Array, y: Array, selector: Array) -> Array:
    """prmt: each nibble of the selector picks a byte of (y, x), or its sign eight times."""
    both = x.astype(np.uint64) | (y.astype(np.uint64) << np.uint64(32))
    result = np.uint32(0)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))).astype(np.uint32) & np.uint32(255)
        signs = np.where(byte >> np.uint32(7), np.uint32(255), np.uint32(0))
        result = result | (np.where(nibble >> np.uint32(3), signs, byte) << np.uint32(8 * place))
    return result


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda x, y: (x != y) & (x == x) & (y == y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _setp(parts: tuple[str, ...]) -> Operation:
    _, compare, kind = parts
    if kind not in ("b16", "b32", "b64", "s32", "s64", "u32", "u64", "f32"):
        raise KeyError(kind)
    return Operation((kind, kind), "pred", _COMPARISONS[compare])


def _ulp(y: Array) -> Array:
    """Distance of fp32 numbers at y."""
    return np.spacing(np.abs(y).astype(np.float32)).astype(np.float64)


_APPROXIMATE: dict[tuple[str, str], tuple[int, Callable[..., Array], Callable[[Array], Array]]] = {
    ("ex2", "approx"): (1, np.exp2, lambda y: 2 * _ulp(y)),
    ("rsqrt", "approx"): (1, lambda x: 1 / np.sqrt(x), lambda y: np.abs(y) * 2.0**-22.9),
    ("div", "full"): (2, np.divide, lambda y: 2 * _ulp(y)),
}
"""fp32 instruction -> operands, function, and exact result -> largest absolute error (PTX ISA 9.1, sections 9.7.3.21,
.16 and .8)."""


def _approximate(function: Callable[..., Array], error_of: Callable[[Array], Array], *values: Array) -> Array:
    """Return the function with its largest error, and exactly for 0, infinity and NaN, as the ISA says."""
    wide = [value.astype(np.float64) for value in values]
    y = function(*wide)
    exact = wide[0] == 0
    for number in (y, *wide):
        exact = exact | ~np.isfinite(number)
    return inexact(y, np.where(exact, 0, error_of(y)), values[0])


def _fused64(x: Array, y: Array, z: Array) -> Array:
    """x * y + z in extended precision: as good as fused, but for the last of 53 bits in rare cases."""
    return (x.astype(np.longdouble) * y + z).astype(np.float64)


def _flushing(function: Callable[..., Array], *values: Array) -> Array:
    """Return fp32 with .ftz."""
    return flushed(function(*map(flushed, values)))


_FLOAT: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "max": (2, maximum),
}


def _float_function(name: str, modifiers: set[str], kind: str) -> tuple[int, Callable[..., Array]]:
    """(operands, function) in fp32 or fp64; fp64 for 16-bit floats."""
    for how in modifiers & {"full", "approx"}:
        if kind != "f32":
            raise KeyError(name)
        count, function, error_of = _APPROXIMATE[name, how]
        return count, partial(_approximate, function, error_of)
    if name == "fma":
        return 3, {"f32": fused32, "f64": _fused64}.get(kind, _multiplied_and_added)
    if (name, kind) == ("sqrt", "f32") and "rn" in modifiers:
        # A root in fp64 is never the middle between two fp32 numbers, so that rounding twice is rounding once.
        return 1, np.sqrt
    return _FLOAT[name]


def _float(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    modifiers = set(parts[1:-1])
    if not modifiers <= _OF_FLOATS or (kind != "f32" and "ftz" in modifiers):
        raise KeyError(name)
    half = _PAIRS.get(kind, kind)
    count, function = _float_function(name, modifiers, half)
    if "ftz" in modifiers:
        function = partial(_flushing, function)
    if half in _HALVES:
        function = partial(on_halves, function, half)
    if kind in _PAIRS:
        function = partial(on_pairs, function, half)
    return Operation((kind,) * count, kind, function)


def _multiplied_and_added(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


_INTEGER: dict[str, tuple[int, int, Callable[..., Array]]] = {
    "add": (2, 0, np.add),
    "sub": (2, 0, np.subtract),
    "mul": (2, 0, np.multiply),
    "mad": (3, 0, _multiplied_and_added),
    "div": (2, 0, _divided),
    "rem": (2, 0, _remainder),
    "neg": (1, 0, np.negative),
    "min": (2, 0, np.minimum),
    "max": (2, 0, np.maximum),
    "and": (2, 0, np.bitwise_and),
    "or": (2, 0, np.bitwise_or),
    "xor": (2, 0, np.bitwise_xor),
    "shl": (1, 1, partial(_shift, left=True)),
    "shr": (1, 1, partial(_shift, left=False)),
    "bfe": (1, 2, _extracted),
    "prmt": (3, 0, _permuted),
}
"""Operands of the opcode's type, then operands of type u32, and the function."""


def _integer(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    if not set(parts[1:-1]) <= _OF_INTEGERS.get(name, set()) or (name in ("prmt", "bfe") and kind[1:] != "32"):
        raise KeyError(name)
    count, counts, function = _INTEGER[name]
    if "wide" not in parts:
        return Operation((kind,) * count + ("u32",) * counts, kind, function)
    wide = _wider(kind)
    dtype = TYPES[wide]
    operands = (kind, kind, wide)[:count]
    return Operation(operands, wide, lambda *values: function(*(value.astype(dtype) for value in values)))


def _cvt(parts: tuple[str, ...]) -> Operation:
    target, source = parts[-2:]
    if parts[1:-2] not in ((), ("rn",)):
        raise KeyError("rounding other than to the nearest")
    if source == "f32" and target in _PAIRS:
        return Operation(("f32", "f32"), target, partial(_packed, _PAIRS[target]))
    if target in _FLOATS:
        return Operation((source,), target, lambda x: _rounded(from_bf16(x) if source == "bf16" else x, target))
    if target in _PAIRS or source in _FLOATS:
        raise KeyError(f"{source} to {target}")
    return Operation((source,), target, lambda x: x.astype(TYPES[target]))


def _packed(half: str, upper: Array, lower: Array) -> Array:
    high, low = (bits_of(_rounded(value, half)).astype(np.uint32) for value in (upper, lower))
    return (high << np.uint32(16)) | low


def _rounded(value: Array, target: str) -> Array:
    if target == "bf16":
        return to_bf16(value if value.dtype.kind == "f" else value.astype(np.float64))
    if target == "f16":
        return np.where(np.isnan(value), NAN16.view(np.float16), value.astype(np.float16))
    return value.astype(TYPES[target])


def _selp(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    return Operation((kind, kind, "pred"), kind, lambda x, y, chosen: np.where(chosen, x, y))


@cache
def operation_of(opcode: str) -> Operation | None:
    """Return the function of an opcode, or None where it is unknown."""
    parts = tuple(opcode.split("."))
    name, kind = parts[0], parts[-1]
    known: Any
    try:
        if name == "cvt":
            known = _cvt(parts)
        elif kind not in TYPES:
            known = None
        elif name in ("setp", "selp"):
            known = {"setp": _setp, "selp": _selp}[name](parts)
        elif kind in _FLOATS or kind in _PAIRS:
            known = _float(name, parts, kind)
        else:
            known = _integer(name, parts, kind)
    except (KeyError, ValueError, IndexError):
        return None
    return known
