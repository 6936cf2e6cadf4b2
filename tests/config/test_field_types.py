"""Bounds of fields: in help, refused by the parser, found where values were set from Python, and in files of one
dataclass."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from megapipe.config import ConfigError
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.field_types import (
    Bound,
    Fraction,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Share,
    base_of,
    bound_of,
    bound_problems,
    in_words,
    rule_of,
    type_hints,
)
from megapipe.config.load import build_parser, parse_as, read_dataclass, written_dataclass


def bounded() -> list[tuple[str, str, Any, Bound]]:
    """Return (group, field, type, bound) for each bounded number of a run."""
    names = []
    for group in fields(BertPretrainConfig):
        if is_dataclass(group.default_factory):
            for name, hint in type_hints(group.default_factory).items():
                kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
                kind = next((each for each in kinds if bound_of(each)), None)
                if kind is not None:
                    names.append((group.name, name, kind, bound_of(kind)))
    return names


def wrong_values(kind: Any, bound: Bound) -> list[float]:
    """Return numbers at and beyond each limit."""
    limits = [bound.least and bound.least - 1, bound.most and bound.most + 1, bound.above, bound.below, -1]
    values = [base_of(kind)(limit) for limit in limits if limit is not None and not bound.holds(limit)]
    return values + ([math.inf, math.nan] if base_of(kind) is float else [])


def test_every_bound_holds_in_parser_and_python() -> None:
    default = BertPretrainConfig()
    cases, flags, expected = bounded(), [], {}
    assert len(cases) > 80
    for group, name, kind, bound in cases:
        field_name = f"{group}.{name}"
        for value in reversed(wrong_values(kind, bound)):
            config = replace(default, **{group: replace(getattr(default, group), **{name: value})})
            expected[field_name] = f"{field_name} is {value}; it must be {bound}"
            problems = config.model.problems() + config.problems()
            assert any(problem.startswith(expected[field_name]) for problem in problems)
        flags.append(f"--{field_name}={value}")
    with pytest.raises(ConfigError) as caught:
        parse_as(BertPretrainConfig, flags)
    assert {problem.partition(" is ")[0] for problem in caught.value.problems} == set(expected)
    assert "data.max_ngram is 0; it must be at least 1" in caught.value.problems


def test_help_shows_every_bound() -> None:
    text = " ".join(build_parser("", BertPretrainConfig).format_all().split()).partition("options:")[2]
    for group, name, _, bound in bounded():
        _, _, rest = text.partition(f"--{group}.{name} ")
        assert f"({bound}" in rest.partition(" --")[0], f"{group}.{name}"


def test_parts_of_lists_and_mappings_have_bounds() -> None:
    default = BertPretrainConfig()
    for part, name, problem in (
        (replace(default.data, blend={"a": 1.0, "b": 0.0}), "data", "data.blend.b is 0.0; it must be above 0"),
        (replace(default.optimizer, betas=(0.9, 1.0)), "", "betas[1] is 1.0; it must be at least 0 and below 1"),
    ):
        assert bound_problems(part, name) == [problem]
    with pytest.raises(ConfigError) as caught:
        parse_as(BertPretrainConfig, ["--parallel.layers_per_stage=[2,0]"])
    assert caught.value.problems == ["parallel.layers_per_stage[1] is 0; it must be at least 1"]


def test_types_in_words() -> None:
    percent = Annotated[float, Bound(0, 100)]
    assert in_words(percent) == "a number from 0 to 100"
    assert in_words(list[percent] | None) == "a list of numbers from 0 to 100, or null"
    assert (rule_of(percent), rule_of(dict[str, percent]), rule_of(int)) == ("from 0 to 100", "each from 0 to 100", "")


@pytest.mark.parametrize(
    ("kind", "allowed", "refused"),
    [
        (Fraction, (0.0, 1.0), (-1e-9, 1.0 + 1e-9)),
        (Share, (1e-9, 1.0), (0.0, 1.0 + 1e-9)),
        (Probability, (0.0, 1.0 - 1e-9), (-1e-9, 1.0)),
        (NaturalFloat, (0.0,), (-1e-9,)),
        (PositiveFloat, (1e-9,), (0.0,)),
        (NaturalInt, (0,), (-1,)),
        (PositiveInt, (1,), (0,)),
    ],
)
def test_named_types_have_the_limits_of_their_names(kind: Any, allowed: Any, refused: Any) -> None:
    bound = bound_of(kind)
    assert bound is not None
    assert all(map(bound.holds, allowed))
    assert not any(map(bound.holds, refused))


@dataclass(frozen=True)
class Shelf:
    books: PositiveInt
    full: Share = 1.0


@dataclass(frozen=True)
class Library:
    name: str
    shelves: tuple[Shelf, ...]
    best: Shelf | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[tuple[float, ...], ...] = ()


def read(text: str) -> Library:
    return read_dataclass(Library, text, "library.yaml", 1000)


def test_a_file_is_read_and_written_back() -> None:
    text = "name: 100\nshelves:\n- {books: 3}\n- {books: 4, full: 5e-1}\nlabels: {a: 1.5}\nsizes: [[0, 1e3], [2, 4]]\n"
    library = read(text)
    assert library == Library("100", (Shelf(3), Shelf(4, 0.5)), None, {"a": "1.5"}, ((0.0, 1000.0), (2.0, 4.0)))
    assert read(written_dataclass(library, "a remark")) == library


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("name: x\nshelves: []\n", ["2: shelves is not a list: write one or more `- ` items"]),
        ("name:\nshelves: [{books: 0, full: 2}]\n", [
            "1: name is empty: write a name",
            "2: shelves[0].books is 0, but must be at least 1",
            "2: shelves[0].full is 2, but must be above 0 and at most 1",
        ]),
        ("name: x\nshelves:\n- books: 1\n  boks: 1\nbest: other.yaml\n", [
            "4: shelves[0].boks is an unknown key; did you mean 'books'? (known here: books, full)",
            "5: best is not a mapping: write `key: value` lines",
        ]),
        ("name: x\nshelves: [{class_path: os.system, init_args: {}}]\n", [
            "2: shelves[0].class_path is an unknown key (known here: books, full)",
            "2: shelves[0].init_args is an unknown key (known here: books, full)",
            "2: shelves[0].books is missing; add it",
        ]),
        ("shelves: [{books: 1.5}]\nsizes: [[1, x]]\n", [
            "1: shelves[0].books is 1.5, but must be a whole number of at least 1",
            "2: sizes is a list or mapping, but must be a list of lists of numbers",
            "1: name is missing; add it",
        ]),
    ],
)  # fmt: skip
def test_all_problems_are_reported_with_their_lines(text: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.problems == [f"library.yaml:{problem}" for problem in problems]
