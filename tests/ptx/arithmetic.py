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
    larger,
    on_halves,
    on_pairs,
    to_bf16,
)

_HALVES = ("f16", "bf16")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_OF_FLOATS = frozenset({"rn", "full", "approx", "ftz", "sat", "NaN"})
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


def _is_float(kind: str) -> bool:
    return kind[0] == "f" or kind[:2] == "bf"


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
    bits = 8 * x.dtype.itemsize
    position, length = (value & np.uint32(255) for value in (position, length))
    bottom = _shift(x, position, left=False)
    kept = np.minimum(length, np.uint32(bits))
    mask = np.where(
        kept == bits, ~np.uint64(0), (np.uint64(1) << np.minimum(kept, 63).astype(np.uint64)) - np.uint64(1)
    )
    field = bits_of(bottom).astype(np.uint64) & mask
    if x.dtype.kind == "i":
        top = np.minimum(position.astype(np.int64) + length - 1, bits - 1)
        sign = ((bits_of(x).astype(np.uint64) >> np.maximum(top, 0).astype(np.uint64)) & np.uint64(1)).astype(bool)
        field = np.where(sign & (length > 0), field | ~mask, field)
    return field.astype(bits_of(x).dtype).view(x.dtype)


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
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": lambda x, y: ~(x == y),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
}
_BOOLEAN: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _setp(parts: tuple[str, ...]) -> Operation:
    kind, compare = parts[-1], _COMPARISONS[parts[1]]
    between = [part for part in parts[2:-1] if part != "ftz"]

    def compared(x: Array, y: Array) -> Array:
        if kind == "bf16":
            x, y = from_bf16(x), from_bf16(y)
        elif "ftz" in parts:
            x, y = flushed(x), flushed(y)
        return compare(x, y)

    if not between:
        return Operation((kind, kind), "pred", compared)
    (combine,) = (_BOOLEAN[part] for part in between)
    return Operation((kind, kind, "pred"), "pred", lambda x, y, also: combine(compared(x, y), also))


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


def _modified(function: Callable[..., Array], modifiers: set[str]) -> Callable[..., Array]:
    """A function that gives fp32, with .ftz and .sat as the opcode asks."""

    def modified(*values: Array) -> Array:
        if "ftz" in modifiers:
            values = tuple(flushed(value) for value in values)
        result = function(*values)
        if "sat" in modifiers:
            result = np.fmin(np.fmax(result, np.float32(0)), np.float32(1))
        return flushed(result) if "ftz" in modifiers else result

    return modified


_FLOAT: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
}


def _float_function(name: str, modifiers: set[str], kind: str) -> tuple[int, Callable[..., Array]]:
    """(operands, function) in fp32 or fp64; fp64 for 16-bit floats."""
    for how in modifiers & {"full", "approx"}:
        if kind != "f32":
            raise KeyError(name)
        count, function, error_of = _APPROXIMATE[name, how]
        return count, partial(_approximate, function, error_of)
    if name in ("min", "max"):
        return 2, partial(larger, sign=1 if name == "max" else -1, keep_nan="NaN" in modifiers)
    if name in ("fma", "mad"):
        return 3, {"f32": fused32, "f64": _fused64}.get(kind, _multiplied_and_added)
    if (name, kind) == ("sqrt", "f32") and "rn" in modifiers:
        # A root in fp64 is never the middle between two fp32 numbers, so that rounding twice is rounding once.
        return 1, np.sqrt
    return _FLOAT[name]


def _float(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    modifiers = set(parts[1:-1])
    if not modifiers <= _OF_FLOATS or (kind != "f32" and {"ftz", "sat"} & modifiers):
        raise KeyError(name)
    half = _PAIRS.get(kind, kind)
    count, function = _float_function(name, modifiers, half)
    if kind == "f32":
        function = _modified(function, modifiers)
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
    "abs": (1, 0, np.abs),
    "min": (2, 0, np.minimum),
    "max": (2, 0, np.maximum),
    "and": (2, 0, np.bitwise_and),
    "or": (2, 0, np.bitwise_or),
    "xor": (2, 0, np.bitwise_xor),
    "not": (1, 0, np.invert),
    "shl": (1, 1, partial(_shift, left=True)),
    "shr": (1, 1, partial(_shift, left=False)),
    "bfe": (1, 2, _extracted),
    "prmt": (3, 0, _permuted),
}
"""Operands of the opcode's type, then operands of type u32, and the function."""


def _integer(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    if not set(parts[1:-1]) <= _OF_INTEGERS.get(name, set()) or (name == "prmt" and kind != "b32"):
        raise KeyError(name)
    count, counts, function = _INTEGER[name]
    if "wide" not in parts:
        return Operation((kind,) * count + ("u32",) * counts, kind, function)
    wide = _wider(kind)
    dtype = TYPES[wide]
    operands = (kind, kind, wide)[:count]
    return Operation(operands, wide, lambda *values: function(*(value.astype(dtype) for value in values)))


_TO_INTEGER: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cvt(parts: tuple[str, ...]) -> Operation:
    target, source = parts[-2:]
    modifiers = set(parts[1:-2])
    if source == "f32" and target in _PAIRS:
        if modifiers != {"rn"}:
            raise KeyError("rounding other than to the nearest")
        return Operation(("f32", "f32"), target, partial(_packed, _PAIRS[target]))
    if not modifiers <= {"rn", "rz", "ftz", "sat", *_TO_INTEGER}:
        raise KeyError(", ".join(modifiers))
    if not _is_float(target) and not _is_float(source):
        return Operation((source,), target, partial(_resized, target=target, saturate="sat" in modifiers))
    to_integers = [_TO_INTEGER[name] for name in modifiers & set(_TO_INTEGER)]
    if _is_float(target):
        if "rz" in modifiers and target != "bf16":
            raise KeyError("rounding other than to the nearest")
        convert = partial(to_bf16, toward_zero=True) if "rz" in modifiers else partial(_rounded, target=target)
    else:
        (_,) = to_integers
        convert = partial(_clipped, target=target)

    def converted(x: Array) -> Array:
        value = from_bf16(x) if source == "bf16" else x
        for function in to_integers:
            value = function(value)
        return convert(value)

    if target != "f32":
        return Operation((source,), target, converted)
    return Operation((source,), target, _modified(converted, modifiers - ({"ftz"} if source != "f32" else set())))


def _packed(half: str, upper: Array, lower: Array) -> Array:
    high, low = (bits_of(_rounded(value, half)).astype(np.uint32) for value in (upper, lower))
    return (high << np.uint32(16)) | low


def _clipped(value: Array, target: str) -> Array:
    """Whole numbers as integers: NaN becomes 0, and numbers out of range the end of the range."""
    dtype = np.dtype(TYPES[target]).type
    low, high = dtype(np.iinfo(dtype).min), dtype(np.iinfo(dtype).max)
    value = value.astype(np.float64)
    inside = np.where((value >= low) & (value < high), value, 0).astype(dtype)
    return np.select([value >= high, value < low], [high, low], inside)


def _rounded(value: Array, target: str) -> Array:
    if target == "bf16":
        return to_bf16(value if value.dtype.kind == "f" else value.astype(np.float64))
    if target == "f16":
        return np.where(np.isnan(value), NAN16.view(np.float16), value.astype(np.float16))
    return value.astype(TYPES[target])


def _resized(x: Array, target: str, saturate: bool) -> Array:
    if saturate:
        limits, own = np.iinfo(TYPES[target]), np.iinfo(x.dtype)
        x = np.clip(x, max(limits.min, own.min), min(limits.max, own.max))
    return x.astype(TYPES[target])


def _selp(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    return Operation((kind, kind, "pred"), kind, lambda x, y, chosen: np.where(chosen, x, y))


def _logic_of_predicates(name: str) -> Operation:
    if name == "not":
        return Operation(("pred",), "pred", np.logical_not)
    return Operation(("pred", "pred"), "pred", _BOOLEAN[name])


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
        elif kind == "pred":
            known = _logic_of_predicates(name)
        elif _is_float(kind):
            known = _float(name, parts, kind)
        else:
            known = _integer(name, parts, kind)
    except (KeyError, ValueError, IndexError):
        return None
    return known
