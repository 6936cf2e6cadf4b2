"""Types of fields: numbers with bounds, such as `steps: PositiveInt` or `window: Annotated[int, Bound(4, 100)]`.

The type is the only place where a field's bounds are written. `--help` shows them, the parser refuses other values,
and `bound_problems` finds values outside of them that were set from Python.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


def whole_number(text: str) -> int:
    """Return the whole number that a text spells in the digits 0 to 9. Raises ValueError for any other text."""
    return int(_in_ascii(text))


def real_number(text: str) -> float:
    """Return the number that a text spells in the digits 0 to 9. Raises ValueError for any other text."""
    return float(_in_ascii(text))


def _in_ascii(text: str) -> str:
    if not text.isascii():  # int() and float() also read the digits of other scripts
        raise ValueError(f"{text!r} is not a number in the digits 0 to 9")
    return text


def has_other_digits(text: str) -> bool:
    """Return whether Python reads a text as a number although not all of its digits are 0 to 9."""
    try:
        return not text.isascii() and bool(str(float(text)))
    except ValueError:
        return False


@dataclass(frozen=True)
class Bound:
    """The values that a number may have; they are always finite.

    least, most: smallest and largest value. above, below: limits that are not values themselves. words: the rule in
    words, if the numbers alone do not say it.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    words: str = ""

    def __str__(self) -> str:
        """Return the rule as the end of a sentence: `at least 1`, `from 1 to 99`, `above 0 and at most 1`."""
        if self.least is not None and self.most is not None and not self.words:
            return f"from {self.least} to {self.most}"
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return self.words or " and ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)

    def holds(self, value: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


NaturalInt = Annotated[int, Bound(least=0)]
PositiveInt = Annotated[int, Bound(least=1)]
Size = Annotated[int, Bound(least=1, most=1 << 20)]
"""A size of a model. With this limit, the number of elements of every parameter fits in 64 bits."""
TokenCount = Annotated[int, Bound(least=1, most=1 << 30)]
"""Number of tokens, or of token ids; limited as `Size`."""
NaturalFloat = Annotated[float, Bound(least=0)]
PositiveFloat = Annotated[float, Bound(above=0)]
Fraction = Annotated[float, Bound(least=0, most=1)]
Share = Annotated[float, Bound(above=0, most=1)]
Probability = Annotated[float, Bound(least=0, below=1)]


def bound_of(hint: Any) -> Bound | None:
    """Return the bound of a type such as `PositiveInt`; None for other types."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Bound)), None)


def base_of(hint: Any) -> Any:
    """Return a type without its bound: int for `PositiveInt`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def rule_of(hint: Any) -> str:
    """Return the bounds of a type or of its parts, such as `at least 1` or `each at least 1`; empty without any."""
    if (bound := bound_of(hint)) is not None:
        return str(bound)
    rule = next(filter(None, map(rule_of, get_args(hint))), "")
    return f"each {rule}" if rule and get_origin(hint) in (list, tuple, dict, Mapping) else rule


def is_value_of(hint: Any, value: Any) -> bool:
    """Return whether a plain value has the type of a field, within its bounds: a number, text, true or false, null,
    one of several words, or a list of such values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_value_of(each, value) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        (inner,) = arguments
        return isinstance(value, list) and all(is_value_of(inner, each) for each in value)
    kind = base_of(hint)
    if kind is NoneType:
        return value is None
    if isinstance(value, bool) or kind is bool:
        return kind is type(value)
    if not isinstance(value, (int, float) if kind is float else kind):
        return False
    bound = bound_of(hint)
    return bound is None or bound.holds(value)


def in_words(hint: Any) -> str:
    """Return the values of a type in words, such as `a whole number of at least 1, or null`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if (bound := bound_of(hint)) is not None:
        return f"{in_words(base_of(hint))}{_joined(bound)}"
    if origin in (Union, UnionType):
        *others, last = [in_words(each).removeprefix("one of ") for each in arguments]
        return f"{', '.join(others)}, or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        count = f"{len(arguments)} " if origin is tuple and ... not in arguments else ""
        return f"a list of {count}{_several(arguments[0])}"
    if origin in (dict, Mapping):
        return f"a mapping of names to {_several(arguments[1])}"
    return {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}.get(hint, "text")


def _several(hint: Any) -> str:
    if (bound := bound_of(hint)) is not None:
        return f"{_several(base_of(hint))}{_joined(bound)}"
    if is_dataclass(hint):
        return f"mappings of any of {', '.join(type_hints(hint))}"
    if get_origin(hint) in (list, tuple):
        return f"lists of {_several(get_args(hint)[0])}"
    if get_origin(hint) in (dict, Mapping):
        return "mappings of fields to values"
    if get_origin(hint) is Literal:
        return f"any of {', '.join(map(str, get_args(hint)))}"
    return {int: "whole numbers", float: "numbers"}.get(hint, "names")


def _joined(bound: Bound) -> str:
    return f" of {bound}" if str(bound).startswith("at ") else f" {bound}"


def type_hints(kind: Any) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name, with their bounds."""
    return _type_hints(kind)


@cache
def _type_hints(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def outside(hint: Any, value: Any, place: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (place, value, rule) for each number outside its bounds, and each text that is not one of the words of its
    type, in a value of a type and all that it contains.

    place: name of the value, such as `parallel.tensor`; the places of parts start with it.
    """
    if value is None or hint is Any:
        return
    if isinstance(value, str):
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words and str not in kinds and value not in words:
            yield place, value, in_words(hint)
    elif is_dataclass(value):
        for name, inner in type_hints(value.__class__).items():
            yield from outside(inner, getattr(value, name), f"{place}.{name}" if place else name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from outside(get_args(hint)[1], each, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        inner = next((each for each in (hint, *get_args(hint)) if get_origin(each) in (list, tuple)), None)
        for index, each in enumerate(value):
            yield from outside(get_args(inner)[0], each, f"{place}[{index}]")
    else:
        bound, rule = _number_rule(hint)
        if bound is not None and not bound.holds(value):
            yield place, value, rule


@cache
def _number_rule(hint: Any) -> tuple[Bound | None, str]:
    """Return the bound of a number's type or of one of its alternatives, and the rule in words."""
    kinds = (hint, *get_args(hint))
    bound = next((each for each in map(bound_of, kinds) if each is not None), None)
    return bound, f"{bound}{', or null' if NoneType in kinds else ''}"


def bound_problems(section: Any, place: str = "") -> list[str]:
    """Return one message for each number or word of a dataclass, or of dataclasses in it, that its type excludes."""
    return [f"{name} is {value}; it must be {rule}" for name, value, rule in outside(None, section, place)]
