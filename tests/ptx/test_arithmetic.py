"""Instructions against exact arithmetic: Python's integers and fractions, one element at a time."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.ptx.assembled import compute
from tests.ptx.numbers import Array

THREADS = 256
FLOATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
"""Bits of the significand, least and largest exponent of normal numbers."""

Oracle = Callable[..., Any]


def words(kind: str, seed: int) -> list[int]:
    """Random integers of a PTX type; half of them are near the ends of the range or small."""
    bits = int(kind[1:])
    generator = np.random.default_rng(seed)
    edges = np.array([0, 1, 2, 31, 32, 33, 63, 64, 255, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1], object)
    picked = [int(generator.choice(edges)) % 2**bits for _ in range(THREADS // 2)]
    picked += [int.from_bytes(generator.bytes(8), "little") % 2**bits for _ in range(THREADS // 2)]
    return np.array(picked, f"u{bits // 8}").view(dtype_of(kind)).tolist()


def numbers(kind: str, seed: int) -> list[float]:
    """Random floats of a PTX type; a quarter are special: subnormal, infinite, zeros of both signs, NaN."""
    precision, least, most = FLOATS[kind]
    generator = np.random.default_rng(seed)
    tiny, huge = 2.0 ** (least - precision + 1), (2.0 - 2.0 ** (1 - precision)) * 2.0**most
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, tiny, -3 * tiny, 2.0**least, huge, -huge]
    drawn = [float(generator.choice(special)) for _ in range(THREADS // 4)]
    while len(drawn) < THREADS:
        exponent = int(generator.integers(-precision, precision)) if len(drawn) % 4 else int(generator.integers(-9, 9))
        drawn.append(rounded(Fraction(float(generator.normal())) * Fraction(2) ** exponent, kind))
    return drawn


def rounded(value: Fraction, kind: str) -> float:
    """The number of a format nearest to a value, to even where two are."""
    precision, least, most = FLOATS[kind]
    if not value:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()  # at most one too large
    exponent = max(exponent - 1 if size < Fraction(2) ** exponent else exponent, least)
    unit = Fraction(2) ** (exponent - precision + 1)
    result = round(size / unit) * unit  # round() goes to the even one
    if result >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(result), value)


def dtype_of(kind: str) -> str:
    """numpy's type of a PTX type; bf16 is stored as its bits."""
    return "u2" if kind == "bf16" else f"{'i' if kind[0] == 's' else kind[0]}{int(kind[1:]) // 8}"


def encoded(values: Sequence[float], kind: str) -> Array:
    if kind == "bf16":
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.array(values, dtype_of(kind))


def decoded(values: Array, kind: str) -> list[Any]:
    if kind == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32).tolist()
    return values.tolist()


def calculate(opcode: str, values: Sequence[Sequence[float]], kinds: Sequence[str], result: str) -> list[Any]:
    """Return the results of an instruction, one for each element of its operands."""
    arrays = [encoded(value, kind) for value, kind in zip(values, kinds, strict=True)]
    empty = np.zeros(len(values[0]), dtype_of(result))
    return decoded(compute(f"{opcode} z, {', '.join('abc'[: len(arrays)])}", arrays, empty), result)


def assert_equal(actual: list[float], expected: list[float]) -> None:
    """Also in the signs of zeros, and in where NaNs are."""
    for one, other in zip(actual, expected, strict=True):
        assert (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )


def field(x: int, position: int, length: int) -> int:
    return x >> (position & 255) & (1 << (length & 255)) - 1


def signed_field(x: int, position: int, length: int) -> int:
    """The same, extended by its highest bit."""
    result = field(x, position, length)
    return result - (1 << (length & 255)) if result and result >> (length & 255) - 1 else result


def permute(x: int, y: int, selector: int) -> int:
    source = (x | y << 32).to_bytes(8, "little")
    picked = []
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        byte = source[nibble & 7]
        picked.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


LONG = "s32 u32 s64 u64"
WORDS = f"{LONG} u16"
LOGIC = "b16 b32 b64"
INTEGERS: list[tuple[str, str, str, str, Oracle]] = [
    ("add", LONG, "t t", "t", operator.add),
    ("sub", LONG, "t t", "t", operator.sub),
    ("mul.lo", LONG, "t t", "t", operator.mul),
    ("min", LONG, "t t", "t", min),
    ("max", LONG, "t t", "t", max),
    ("mul.wide", "s32 u32", "t t", "wide", operator.mul),
    ("mad.wide", "s32 u32", "t t wide", "wide", lambda x, y, w: x * y + w),
    ("mad.lo", "s32 u64", "t t t", "t", lambda x, y, w: x * y + w),
    ("div", LONG, "t t", "t", lambda x, y: quotient(x, y) if y else -1),
    ("rem", LONG, "t t", "t", lambda x, y: x - y * quotient(x, y) if y else x),
    ("neg", "s32 s64", "t", "t", operator.neg),
    ("and", LOGIC, "t t", "t", operator.and_),
    ("or", LOGIC, "t t", "t", operator.or_),
    ("xor", LOGIC, "t t", "t", operator.xor),
    ("shl", LOGIC, "t u32", "t", lambda x, n: x << min(n, 64)),
    ("shr", f"{LONG} u16", "t u32", "t", lambda x, n: x >> min(n, 64)),
    ("bfe", "u32", "t u32 u32", "t", field),
    ("bfe", "s32", "t u32 u32", "t", signed_field),
    ("prmt", "b32", "t t t", "t", permute),
    *((f"cvt.{target}", WORDS, "t", target, int) for target in WORDS.split()),
]
"""Opcode, types that end it, operands and result (`t` of this type, `wide` of twice its width), and the oracle."""


def integer_instructions() -> Iterator[tuple[str, list[str], str, Oracle]]:
    for name, kinds, operands, result, oracle in INTEGERS:
        for kind in kinds.split():
            own = kind.replace("b", "u")
            types = {"t": own, "wide": f"{own[0]}{2 * int(own[1:])}"}
            operand_types = [types.get(operand, operand) for operand in operands.split()]
            yield f"{name}.{kind}", operand_types, types.get(result, result), oracle


@pytest.mark.parametrize(("opcode", "operands", "result", "oracle"), list(integer_instructions()))
def test_integers(opcode: str, operands: list[str], result: str, oracle: Oracle) -> None:
    values = [words(kind, seed) for seed, kind in enumerate(operands)]
    bits = int(result[1:])
    expected = [oracle(*row) % 2**bits for row in zip(*values, strict=True)]
    assert calculate(opcode, values, operands, f"u{bits}") == expected


def exact(function: Oracle, kind: str, fallback: Oracle | None = None) -> Oracle:
    """A function on fractions, rounded to a format; `fallback` where an operand is not finite or the result is 0."""

    def apply(*values: float) -> float:
        if all(math.isfinite(value) for value in values):
            result = function(*(Fraction(value) for value in values))
            if result:
                return rounded(result, kind)
        return (fallback or function)(*values)

    return apply


def maximum(x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
        return y if math.isnan(x) else x
    if x == y:
        return x if math.copysign(1, x) > math.copysign(1, y) else y
    return max(x, y)


NARROW = ("f32", "f16", "bf16")
ARITHMETIC: list[tuple[str, int, Sequence[str], Oracle]] = [
    ("add.rn", 2, (*NARROW, "f64"), operator.add),
    ("sub.rn", 2, (*NARROW, "f64"), operator.sub),
    ("mul.rn", 2, (*NARROW, "f64"), operator.mul),
    ("fma.rn", 3, NARROW, lambda x, y, z: x * y + z),
    ("max", 2, NARROW, maximum),
    ("neg", 1, (*NARROW, "f64"), operator.neg),
    ("abs", 1, (*NARROW, "f64"), abs),
    ("div.rn", 2, ("f32",), lambda x, y: x / y if y else 0),
]
"""Opcode, operands, formats, and the function of exact numbers."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "count", "kind", "function"),
    [(name, count, kind, function) for name, count, kinds, function in ARITHMETIC for kind in kinds],
)
def test_floats(name: str, count: int, kind: str, function: Oracle) -> None:
    values = [numbers(kind, seed) for seed in range(count)]
    oracle = exact(function, kind, np.divide if name == "div.rn" else None)
    results = calculate(f"{name}.{kind}", values, [kind] * count, kind)
    assert_equal(results, [oracle(*row) for row in zip(*values, strict=True)])


def test_results_are_rounded_once() -> None:
    """Exact results so near to the middle of two numbers that fp64, or fp32 before bf16, would put them on it."""
    step = 2.0**-23
    operands = [2.0**-12 * (1 + step), 2.0**-12 * (1 - step), 1 + step]
    for signs in ((1, 1, 1), (-1, 1, -1)):
        values = [[sign * value] for sign, value in zip(signs, operands, strict=True)]
        assert calculate("fma.rn.f32", values, ["f32"] * 3, "f32") == [signs[2] * (1 + step)]
    near_ties = [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-8]
    assert calculate("cvt.rn.bf16.f64", [near_ties], ["f64"], "bf16") == [1 + 2.0**-7, 1 + 2.0**-7, 1.0]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "mul", "fma.rn", "max"])
def test_pairs_are_two_numbers(name: str, kind: str) -> None:
    count = 3 if name == "fma.rn" else 2
    halves = [encoded(numbers(kind, seed), kind) for seed in range(count)]
    letters = ", ".join("abc"[:count])
    alone = compute(f"{name}.{kind} z, {letters}", halves, np.zeros_like(halves[0]))
    words = [half.view(np.uint32) for half in halves]
    assert compute(f"{name}.{kind}x2 z, {letters}", words, np.zeros_like(words[0])).tobytes() == alone.tobytes()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_between_floats(source: str, target: str) -> None:
    wider = FLOATS[target][0] >= FLOATS[source][0] and target != "f16"
    if source != target:
        values = numbers(source, 7)
        results = calculate(f"cvt{'' if wider else '.rn'}.{target}.{source}", [values], [source], target)
        assert_equal(results, [exact(lambda x: x, target)(value) for value in values])


def test_two_numbers_become_a_pair() -> None:
    values = [numbers("f32", 1), numbers("f32", 2)]
    for kind in ("f16", "bf16"):
        pairs = calculate(f"cvt.rn.{kind}x2.f32", values, ["f32", "f32"], "u32")
        for shift, wanted in zip((16, 0), values, strict=True):
            half = np.array([pair >> shift & 0xFFFF for pair in pairs], np.uint16).view(dtype_of(kind))
            assert_equal(decoded(half, kind), [exact(lambda x: x, kind)(value) for value in wanted])


BOUNDS: list[tuple[str, Callable[[float], float], float, Callable[[float], float]]] = [
    ("rsqrt.approx.f32", lambda x: x**-0.5, 2**-22.9, abs),
    ("ex2.approx.f32", lambda x: 2.0**x, 2 * 2.0**29, math.ulp),
    ("div.full.f32", lambda x: x / 0.7109375, 2 * 2.0**29, math.ulp),
]
"""Opcode, function, and the bound that the PTX ISA states for its error, relative or in units of fp32, as `ulp` of
fp64 times 2^29."""


@pytest.mark.parametrize(("opcode", "function", "bound", "unit"), BOUNDS)
def test_approximations_have_exactly_the_allowed_error(
    opcode: str, function: Callable[[float], float], bound: float, unit: Callable[[float], float]
) -> None:
    x = np.random.default_rng(3).uniform(0.55, 1.95, THREADS).astype(np.float32).tolist()
    values = [x, [0.7109375] * THREADS] if opcode[:3] == "div" else [x]
    results = calculate(opcode, values, ["f32"] * len(values), "f32")
    wanted = [function(value) for value in x]
    errors = [(y - z) / (bound * unit(z)) for y, z in zip(results, wanted, strict=True)]
    assert max(errors) > 0.5
    assert min(errors) < -0.5
    assert max(map(abs, errors)) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("opcode", "operands", "results"),
    [
        ("ex2.approx", [-math.inf, -0.0, 0.0, math.inf], [0.0, 1.0, 1.0, math.inf]),
        ("rsqrt.approx", [-math.inf, -0.0, 0.0, math.inf], [math.nan, -math.inf, math.inf, 0.0]),
        ("add", [2.0**-130], [2.0**-129]),
        ("add.ftz", [2.0**-130], [0.0]),
    ],
)
def test_special_and_subnormal_numbers(opcode: str, operands: list[float], results: list[float]) -> None:
    """Approximations of special numbers are exact (tables of the PTX ISA); .ftz makes subnormal numbers 0."""
    values = [operands] * (2 if opcode[:3] == "add" else 1)
    assert_equal(calculate(f"{opcode}.f32", values, ["f32"] * len(values), "f32"), results)


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ne": lambda x, y: x < y or x > y,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("kind", ["f32", "s32", "u64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str, kind: str) -> None:
    """selp of 1 and 0 shows the predicate."""
    draw: Callable[[str, int], list[Any]] = numbers if kind in FLOATS else words
    x, y = draw(kind, 1), draw(kind, 2)
    x[::5] = y[::5]
    body = f"setp.{name}.{kind} %p1, a, b;\nselp.b32 z, 1, 0, %p1"
    results = compute(body, [encoded(x, kind), encoded(y, kind)], np.zeros(THREADS, np.uint32))
    expected = [COMPARISONS[name](a, b) for a, b in zip(x, y, strict=True)]
    assert results.astype(bool).tolist() == expected
