"""Instructions against exact arithmetic: Python's integers and fractions, one element at a time."""

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.assembled import compute
from tests.ptx.numbers import Array

THREADS = 256


def words(kind: str, seed: int) -> Array:
    """Random integers of a PTX type, many of them near the ends of its range or small."""
    bits = int(kind[1:])
    generator = np.random.default_rng(seed)
    edges = np.array([0, 1, 2, 31, 32, 33, 63, 64, 255, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1], object)
    picked = [int(generator.choice(edges)) % 2**bits for _ in range(THREADS // 2)]
    picked += [int.from_bytes(generator.bytes(8), "little") % 2**bits for _ in range(THREADS // 2)]
    return np.array(picked, f"u{bits // 8}").view(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")


def signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def field(x: int, position: int, length: int, bits: int, extend: bool) -> int:
    position, length = position & 255, length & 255
    if not length:
        return 0
    result = 0
    sign = (x >> min(position + length - 1, bits - 1)) & 1 if extend else 0
    for place in range(bits):
        inside = place < length and position + place < bits
        result |= ((x >> (position + place)) & 1 if inside else sign) << place
    return result


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


def clamped(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


Oracle = Callable[..., int]

INTEGERS: list[tuple[str, str, str, Oracle]] = [
    *(
        (f"{name}.{kind} z, a, b", f"{kind} {kind}", kind, function)
        for kind in ("s32", "u32", "s64", "u64", "s16")
        for name, function in [
            ("add", lambda x, y: x + y),
            ("sub", lambda x, y: x - y),
            ("mul.lo", lambda x, y: x * y),
            ("min", min),
            ("max", max),
        ]
    ),
    *(
        (f"mul.wide.{kind} z, a, b", f"{kind} {kind}", f"{kind[0]}{2 * int(kind[1:])}", lambda x, y: x * y)
        for kind in ("s16", "u16", "s32", "u32")
    ),
    *(
        (f"mad.wide.{kind} z, a, b, c", f"{kind} {kind} {kind[0]}64", f"{kind[0]}64", lambda x, y, w: x * y + w)
        for kind in ("s32", "u32")
    ),
    *(
        (f"mad.lo.{kind} z, a, b, c", f"{kind} {kind} {kind}", kind, lambda x, y, w: x * y + w)
        for kind in ("s32", "u64")
    ),
    *(
        (f"{name}.{kind} z, a, b", f"{kind} {kind}", kind, function)
        for kind in ("s32", "u32", "s64", "u64")
        for name, function in [
            ("div", lambda x, y: quotient(x, y) if y else -1),
            ("rem", lambda x, y: x - y * quotient(x, y) if y else x),
        ]
    ),
    *((f"neg.{kind} z, a", kind, kind, lambda x: -x) for kind in ("s32", "s64")),
    *((f"abs.{kind} z, a", kind, kind, abs) for kind in ("s32", "s64")),
    *(
        (f"{name}.{kind} z, a, b", f"u{kind[1:]} u{kind[1:]}", f"u{kind[1:]}", function)
        for kind in ("b16", "b32", "b64")
        for name, function in [
            ("and", lambda x, y: x & y),
            ("or", lambda x, y: x | y),
            ("xor", lambda x, y: x ^ y),
        ]
    ),
    *((f"not.{kind} z, a", f"u{kind[1:]}", f"u{kind[1:]}", lambda x: ~x) for kind in ("b16", "b32", "b64")),
    *(
        (f"shl.b{bits} z, a, b", f"u{bits} u32", f"u{bits}", lambda x, n, bits=bits: x << n if n < bits else 0)
        for bits in (16, 32, 64)
    ),
    *(
        (f"shr.{kind} z, a, b", f"{kind} u32", kind, lambda x, n, bits=int(kind[1:]): x >> min(n, bits))
        for kind in ("u16", "u32", "s32", "u64", "s64")
    ),
    *(
        (
            f"bfe.{kind} z, a, b, c",
            f"{kind} u32 u32",
            kind,
            lambda x, p, n, kind=kind: field(x % 2 ** int(kind[1:]), p, n, int(kind[1:]), kind[0] == "s"),
        )
        for kind in ("u32", "s32", "u64", "s64")
    ),
    ("prmt.b32 z, a, b, c", "u32 u32 u32", "u32", permute),
    *(
        (f"cvt.{target}.{source} z, a", source, target, lambda x: x)
        for source in ("s32", "u32", "s64", "u64", "s16", "u16")
        for target in ("s32", "u32", "s64", "u64", "s16", "u16")
    ),
    ("cvt.sat.s32.s64 z, a", "s64", "s32", lambda x: clamped(x, -(2**31), 2**31 - 1)),
    ("cvt.sat.u16.s32 z, a", "s32", "u16", lambda x: clamped(x, 0, 2**16 - 1)),
]


@pytest.mark.parametrize(("instruction", "operands", "result", "oracle"), INTEGERS, ids=[row[0] for row in INTEGERS])
def test_integers(instruction: str, operands: str, result: str, oracle: Oracle) -> None:
    values = [words(kind, seed) for seed, kind in enumerate(operands.split())]
    bits = int(result[1:])
    results = compute(instruction, values, np.zeros(THREADS, f"u{bits // 8}"))
    expected = [oracle(*(int(value[lane]) for value in values)) % 2**bits for lane in range(THREADS)]
    assert results.tolist() == expected


FLOATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
"""Bits of the significand, least and largest exponent of normal numbers."""


def numbers(kind: str, seed: int) -> list[float]:
    """Random numbers of a format, many of them special: subnormal, infinite, zeros of both signs, NaN."""
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
    exponent = max(math.floor(math.log2(size)) if size > 2**-1000 else -2000, least)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > least and size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - precision + 1)
    result = round(size / unit) * unit  # round() goes to the even one
    if result >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(result), value)


def encoded(values: list[float], kind: str) -> Array:
    if kind == "bf16":
        return np.array([struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values], np.uint16)
    return np.array(values, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])


def decoded(values: Array, kind: str) -> list[float]:
    if kind == "bf16":
        return [struct.unpack("<f", struct.pack("<I", int(value) << 16))[0] for value in values]
    return [float(value) for value in values]


def exact(function: Callable[..., Fraction], kind: str, fallback: Callable[..., float]) -> Callable[..., float]:
    """A function on fractions, rounded to a format; `fallback` where an operand is not finite or the result is 0."""

    def apply(*values: float) -> float:
        if all(math.isfinite(value) for value in values):
            result = function(*(Fraction(value) for value in values))
            if result:
                return rounded(result, kind)
        return fallback(*values)

    return apply


def larger(x: float, y: float, sign: int, keep: bool) -> float:
    if math.isnan(x) or math.isnan(y):
        return math.nan if keep or (math.isnan(x) and math.isnan(y)) else (y if math.isnan(x) else x)
    if x == y:
        return x if (math.copysign(1, x) > math.copysign(1, y)) == (sign > 0) else y
    return (max if sign > 0 else min)(x, y)


def product_and_sum(x: float, y: float, z: float) -> float:
    try:
        return x * y + z
    except OverflowError:
        return math.nan


ARITHMETIC: list[tuple[str, int, str, Callable[..., float]]] = [
    *(
        (f"{name}.{kind}", count, kind, exact(function, kind, fallback))
        for kind in FLOATS
        for name, count, function, fallback in [
            ("add.rn", 2, lambda x, y: x + y, lambda x, y: x + y),
            ("sub.rn", 2, lambda x, y: x - y, lambda x, y: x - y),
            ("mul.rn", 2, lambda x, y: x * y, lambda x, y: x * y),
            ("fma.rn", 3, lambda x, y, z: x * y + z, product_and_sum),
        ]
        if (name, kind) != ("fma.rn", "f64")
    ),
    *(
        (
            f"{name}{'.NaN' if keep else ''}.{kind}",
            2,
            kind,
            lambda x, y, sign=sign, keep=keep: larger(x, y, sign, keep),
        )
        for kind in ("f32", "f16", "bf16")
        for name, sign in (("max", 1), ("min", -1))
        for keep in (False, True)
    ),
    *((f"neg.{kind}", 1, kind, lambda x: -x) for kind in FLOATS),
    *((f"abs.{kind}", 1, kind, abs) for kind in FLOATS),
    (
        "div.rn.f32",
        2,
        "f32",
        exact(lambda x, y: x / y if y else Fraction(0), "f32", lambda x, y: float(np.float32(x) / np.float32(y))),
    ),
]


def assert_equal(actual: list[float], expected: list[float]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("opcode", "count", "kind", "oracle"), ARITHMETIC, ids=[row[0] for row in ARITHMETIC])
def test_floats(opcode: str, count: int, kind: str, oracle: Callable[..., float]) -> None:
    values = [numbers(kind, seed) for seed in range(count)]
    arrays = [encoded(value, kind) for value in values]
    letters = ", ".join("abc"[:count])
    results = compute(f"{opcode} z, {letters}", arrays, np.zeros_like(arrays[0]))
    assert_equal(decoded(results, kind), [oracle(*row) for row in zip(*values, strict=True)])


def test_results_are_rounded_once() -> None:
    """Exact results so near to the middle of two numbers that fp64, or fp32 before bf16, would put them on it."""
    step = 2.0**-23
    operands = [2.0**-12 * (1 + step), 2.0**-12 * (1 - step), 1 + step]
    for signs in ((1, 1, 1), (-1, 1, -1)):
        arrays = [np.full(1, sign * value, np.float32) for sign, value in zip(signs, operands, strict=True)]
        results = compute("fma.rn.f32 z, a, b, c", arrays, np.zeros(1, np.float32))
        assert results.tolist() == [signs[2] * (1 + step)]
    near_ties = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-8])
    narrow = compute("cvt.rn.bf16.f64 z, a", [near_ties], np.zeros(3, np.uint16))
    assert decoded(narrow, "bf16") == [1 + 2.0**-7, 1 + 2.0**-7, 1.0]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "mul", "fma.rn", "max"])
def test_pairs_are_two_numbers(name: str, kind: str) -> None:
    count = 3 if name == "fma.rn" else 2
    halves = [encoded(numbers(kind, seed), kind) for seed in range(count)]
    letters = ", ".join("abc"[:count])
    alone = compute(f"{name}.{kind} z, {letters}", halves, np.zeros_like(halves[0]))
    joined = compute(
        f"{name}.{kind}x2 z, {letters}", [half.view(np.uint32) for half in halves], np.zeros(128, np.uint32)
    )
    assert joined.tobytes() == alone.tobytes()


ROUNDINGS = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("source", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16", "s32", "u32", "s64", "u16"])
def test_conversions(source: str, target: str) -> None:
    values = numbers(source, 7)
    for mode in ("rn",) if target in FLOATS else ROUNDINGS:
        if target in FLOATS:
            if source == target:
                continue
            wider = FLOATS[target][0] >= FLOATS[source][0] and target != "f16"
            opcode = f"cvt.{target}.{source}" if wider else f"cvt.rn.{target}.{source}"
            results = compute(f"{opcode} z, a", [encoded(values, source)], encoded([0.0] * THREADS, target))
            oracle = exact(lambda x: x, target, lambda x: x)
            assert_equal(decoded(results, target), [oracle(value) for value in values])
            continue
        bits = int(target[1:])
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target[0] == "s" else (0, 2**bits - 1)
        results = compute(
            f"cvt.{mode}.{target}.{source} z, a", [encoded(values, source)], np.zeros(THREADS, f"u{bits // 8}")
        )
        expected = []
        for value in values:
            if math.isnan(value):
                expected.append(0)
            elif math.isinf(value):
                expected.append(high if value > 0 else low)
            else:
                expected.append(clamped(ROUNDINGS[mode](value), low, high))
        assert results.tolist() == [value % 2**bits for value in expected]


def test_two_numbers_become_a_pair() -> None:
    upper, lower = numbers("f32", 1), numbers("f32", 2)
    arrays = [encoded(upper, "f32"), encoded(lower, "f32")]
    for kind in ("f16", "bf16"):
        results = compute(f"cvt.rn.{kind}x2.f32 z, a, b", arrays, np.zeros(THREADS, np.uint32)).view(np.uint16)
        halves = results if kind == "bf16" else results.view(np.float16)
        nearest = exact(lambda x: x, kind, lambda x: x)
        assert_equal(decoded(halves[1::2], kind), [nearest(value) for value in upper])
        assert_equal(decoded(halves[0::2], kind), [nearest(value) for value in lower])


def relative(y: float) -> float:
    return abs(y)


def units(y: float) -> float:
    """Return the unit in the last place of fp32."""
    return math.ulp(y) * 2.0**29


BOUNDS: list[tuple[str, Callable[[float], float], float, Callable[[float], float]]] = [
    ("rsqrt.approx.f32", lambda x: x**-0.5, 2**-22.9, relative),
    ("ex2.approx.f32", lambda x: 2.0**x, 2, units),
    ("div.full.f32", lambda x: x / 0.7109375, 2, units),
]
"""Opcode, function, and the bound that the PTX ISA states for its error, with the unit of the bound."""


@pytest.mark.parametrize(("opcode", "function", "bound", "unit"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_approximations_have_exactly_the_allowed_error(
    opcode: str, function: Callable[[float], float], bound: float, unit: Callable[[float], float]
) -> None:
    kind = opcode.split(".")[-1]
    x = encoded(np.random.default_rng(3).uniform(0.55, 1.95, THREADS).tolist(), kind)
    arrays = [x, np.full_like(x, 0.7109375)] if opcode[:3] == "div" else [x]
    results = compute(f"{opcode} z, {'a, b' if opcode[:3] == 'div' else 'a'}", arrays, np.zeros_like(x))
    wanted = [function(value) for value in decoded(x, kind)]
    errors = [(y - z) / (bound * unit(z)) for y, z in zip(decoded(results, kind), wanted, strict=True)]
    assert max(errors) > 0.5
    assert min(errors) < -0.5
    assert max(map(abs, errors)) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("opcode", "operands", "results"),
    [
        ("ex2.approx", [-math.inf, -0.0, 0.0, math.inf], [0.0, 1.0, 1.0, math.inf]),
        ("rsqrt.approx", [-math.inf, -0.0, 0.0, math.inf], [math.nan, -math.inf, math.inf, 0.0]),
    ],
)
def test_approximations_of_special_numbers_are_exact(opcode: str, operands: list[float], results: list[float]) -> None:
    """The tables of the PTX ISA's sections."""
    x = np.resize(np.array(operands, np.float32), THREADS)
    actual = compute(f"{opcode}.f32 z, a", [x], np.zeros(THREADS, np.float32))
    assert_equal(actual.tolist(), np.resize(results, THREADS).tolist())


def test_subnormal_numbers_are_flushed_where_the_opcode_says_so() -> None:
    x = np.full(THREADS, 2.0**-130, np.float32)
    kept = compute("add.f32 z, a, a", [x], np.zeros(THREADS, np.float32))
    flushed = compute("add.ftz.f32 z, a, a", [x], np.zeros(THREADS, np.float32))
    assert (kept == 2.0**-129).all()
    assert (flushed == 0).all()


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x < y or x > y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("kind", ["f32", "bf16", "s32", "u64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str, kind: str) -> None:
    """The unordered forms are true of NaNs; an absent operand of selp shows the predicate."""
    of_floats = kind in FLOATS
    x, y = (numbers(kind, seed) if of_floats else words(kind, seed).tolist() for seed in (1, 2))
    x[::5] = y[::5]
    arrays = [
        encoded(value, kind) if of_floats else np.array(value, f"{'iu'[kind[0] == 'u']}{int(kind[1:]) // 8}")
        for value in (x, y)
    ]
    for suffix in ("", "u") if of_floats else ("",):
        body = f"setp.{name}{suffix}.{kind} %p1, a, b;\nselp.b32 z, 1, 0, %p1"
        results = compute(body, arrays, np.zeros(THREADS, np.uint32))
        unordered = [suffix == "u" and (math.isnan(a) or math.isnan(b)) for a, b in zip(x, y, strict=True)]
        expected = [COMPARISONS[name](a, b) or open_ for a, b, open_ in zip(x, y, unordered, strict=True)]
        assert results.astype(bool).tolist() == expected
