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
    narrowed,
    on_pairs,
    to_bf16,
    widened,
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


def _bits(kind: str) -> int:
    return 8 * np.dtype(TYPES[kind]).itemsize


def _wider(kind: str) -> str:
    return f"{kind[0]}{2 * _bits(kind)}"


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
    convert = from_bf16 if kind == "bf16" else flushed if "ftz" in parts else _same

    def compared(x: Array, y: Array) -> Array:
        return compare(convert(x), convert(y))

    if not between:
        return Operation((kind, kind), "pred", compared)
    (combine,) = (_BOOLEAN[part] for part in between)
    return Operation((kind, kind, "pred"), "pred", lambda x, y, also: combine(compared(x, y), also))


def _same(x: Array) -> Array:
    return x


def _ulp(y: Array) -> Array:
    """Distance of fp32 numbers at y."""
    return np.spacing(np.abs(y).astype(np.float32)).astype(np.float64)


_APPROXIMATE: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "ex2": (np.exp2, lambda y: 2 * _ulp(y)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda y: np.abs(y) * 2.0**-22.9),
}
"""Function of fp32 -> itself, and exact result -> largest absolute error (PTX ISA 9.1, sections 9.7.3.21 and .16)."""


def _approximate(name: str, x: Array) -> Array:
    """Return the function with its largest error, and exactly for 0, infinity and NaN, as the ISA says."""
    function, error_of = _APPROXIMATE[name]
    wide = x.astype(np.float64)
    y = function(wide)
    error = np.where(np.isfinite(y) & np.isfinite(wide) & (wide != 0), error_of(y), 0)
    return inexact(y, error, x)


def _divided_approximately(x: Array, y: Array) -> Array:
    """Return div.full, with two units in the last place (PTX ISA 9.7.3.8)."""
    quotient = x.astype(np.float64) / y
    error = np.where(np.isfinite(quotient) & (quotient != 0), 2 * _ulp(quotient), 0)
    return inexact(quotient, error, x)


def _flushing(parts: tuple[str, ...], operation: Operation) -> Operation:
    """With .ftz and .sat, as the opcode asks."""
    function = operation.function
    if operation.result != "f32":
        return operation
    if "sat" in parts:
        exact = function
        function = lambda *values: np.fmin(np.fmax(exact(*values), np.float32(0)), np.float32(1))  # noqa: E731
    if "ftz" in parts:
        inner = function
        function = lambda *values: flushed(inner(*(flushed(value) for value in values)))  # noqa: E731
    return Operation(operation.operands, operation.result, function)


def _fused64(x: Array, y: Array, z: Array) -> Array:
    """x * y + z in extended precision: as good as fused, but for the last of 53 bits in rare cases."""
    return (x.astype(np.longdouble) * y + z).astype(np.float64)


_FLOAT: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
}


def _float(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    if not set(parts[1:-1]) <= _OF_FLOATS or (kind != "f32" and {"ftz", "sat"} & set(parts)):
        raise KeyError(name)
    if kind in _PAIRS:
        inner = _float(name, (*parts[:-1], _PAIRS[kind]), _PAIRS[kind])
        return Operation((kind,) * len(inner.operands), kind, partial(on_pairs, inner.function, _PAIRS[kind]))
    if name in ("min", "max"):
        choose = partial(larger, sign=1 if name == "max" else -1, keep_nan="NaN" in parts)
        if kind in _HALVES:
            return Operation(
                (kind, kind), kind, lambda x, y: narrowed(choose(widened(x, kind), widened(y, kind)), kind)
            )
        return _flushing(parts, Operation((kind, kind), kind, choose))
    if name in ("fma", "mad"):
        if kind in _HALVES:
            return Operation(
                (kind,) * 3,
                kind,
                lambda x, y, z: narrowed(widened(x, kind) * widened(y, kind) + widened(z, kind), kind),
            )
        return _flushing(parts, Operation((kind,) * 3, kind, fused32 if kind == "f32" else _fused64))
    if "approx" in parts and kind == "f32" and name in _APPROXIMATE:
        return _flushing(parts, Operation(("f32",), "f32", partial(_approximate, name)))
    if (name, kind) == ("sqrt", "f32") and "rn" in parts:
        # A root in fp64 is never the middle between two fp32 numbers, so that rounding twice is rounding once.
        return _flushing(parts, Operation(("f32",), "f32", np.sqrt))
    if "full" in parts and (name, kind) == ("div", "f32"):
        return _flushing(parts, Operation(("f32", "f32"), "f32", _divided_approximately))
    if {"full", "approx"} & set(parts):
        raise KeyError(name)
    function = _FLOAT[name]
    count = 1 if name in ("neg", "abs") else 2
    if kind in _HALVES:
        return Operation(
            (kind,) * count,
            kind,
            lambda *values: narrowed(function(*(widened(value, kind) for value in values)), kind),
        )
    return _flushing(parts, Operation((kind,) * count, kind, function))


_INTEGER: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "mad": (3, lambda x, y, z: x * y + z),
    "div": (2, _divided),
    "rem": (2, _remainder),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or),
    "xor": (2, np.bitwise_xor),
    "not": (1, np.invert),
}


def _integer(name: str, parts: tuple[str, ...], kind: str) -> Operation:
    if not set(parts[1:-1]) <= _OF_INTEGERS.get(name, set()):
        raise KeyError(name)
    if name in ("mul", "mad") and "wide" in parts:
        wide = TYPES[_wider(kind)]
        if name == "mul":
            return Operation((kind, kind), _wider(kind), lambda x, y: x.astype(wide) * y.astype(wide))
        return Operation((kind, kind, _wider(kind)), _wider(kind), lambda x, y, z: x.astype(wide) * y.astype(wide) + z)
    if name in ("shl", "shr"):
        return Operation((kind, "u32"), kind, partial(_shift, left=name == "shl"))
    if name == "bfe":
        return Operation((kind, "u32", "u32"), kind, _extracted)
    if name == "prmt" and parts == ("prmt", "b32"):
        return Operation(("u32",) * 3, "u32", _permuted)
    count, function = _INTEGER[name]
    return Operation((kind,) * count, kind, function)


_TO_INTEGER: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cvt(parts: tuple[str, ...]) -> Operation:
    target, source = parts[-2:]
    modifiers = set(parts[1:-2])
    if source == "f32" and target in _PAIRS:
        if modifiers != {"rn"}:
            raise KeyError("rounding other than to the nearest")
        half = _PAIRS[target]

        def packed(upper: Array, lower: Array) -> Array:
            high, low = (bits_of(_rounded(value, half)).astype(np.uint32) for value in (upper, lower))
            return (high << np.uint32(16)) | low

        return Operation(("f32", "f32"), target, packed)
    if not modifiers <= {"rn", "rz", "ftz", "sat", *_TO_INTEGER}:
        raise KeyError(", ".join(modifiers))
    if _is_float(target):
        if "rz" in modifiers and target != "bf16":
            raise KeyError("rounding other than to the nearest")

        def to_float(x: Array) -> Array:
            value = from_bf16(x) if source == "bf16" else x
            for name in modifiers & set(_TO_INTEGER):
                value = _TO_INTEGER[name](value)
            if "rz" in modifiers:
                return to_bf16(value, toward_zero=True)
            return _rounded(value, target)

        return _flushing(
            ("sat",) * ("sat" in modifiers) + ("ftz",) * ("ftz" in modifiers and source == "f32"),
            Operation((source,), target, to_float),
        )
    if not _is_float(source):
        return Operation((source,), target, partial(_resized, target=target, saturate="sat" in modifiers))
    (rounding,) = modifiers & set(_TO_INTEGER)

    def to_integer(x: Array) -> Array:
        value = (from_bf16(x) if source == "bf16" else x).astype(np.float64)
        limits = np.iinfo(TYPES[target])
        value = _TO_INTEGER[rounding](value)
        inside = np.where(np.isnan(value) | (value < limits.min) | (value >= float(limits.max)), 0, value)
        converted = inside.astype(TYPES[target])
        converted = np.where(
            value >= float(limits.max), limits.max, np.where(value < limits.min, limits.min, converted)
        )
        return np.where(np.isnan(value), 0, converted).astype(TYPES[target])

    return Operation((source,), target, to_integer)


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
