"""Bounds of fields: in help, refused by the parser, and found where values were set from Python."""

import math
from dataclasses import fields, is_dataclass, replace
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
from megapipe.config.load import build_parser, parse_as


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
    cases, refused = bounded(), {}
    assert len(cases) > 80
    for group, name, kind, bound in cases:
        first, *_ = values = wrong_values(kind, bound)
        for value in values:
            config = replace(default, **{group: replace(getattr(default, group), **{name: value})})
            expected = f"{group}.{name} is {value}; it must be {bound}"
            assert any(problem.startswith(expected) for problem in config.model.problems() + config.problems())
        refused[f"{group}.{name}"] = first
    with pytest.raises(ConfigError) as caught:
        parse_as(BertPretrainConfig, [f"--{name}={value}" for name, value in refused.items()])
    assert {problem.partition(" is ")[0] for problem in caught.value.problems} == set(refused)


def test_help_shows_every_bound() -> None:
    text = " ".join(build_parser("", BertPretrainConfig).format_all().split()).partition("options:")[2]
    for group, name, _, bound in bounded():
        _, _, rest = text.partition(f"--{group}.{name} ")
        assert f"({bound}" in rest.partition(" --")[0], f"{group}.{name}"


def test_all_numbers_outside_their_bounds_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_as(
            BertPretrainConfig, ["--batch.micro_size=0", "--parallel.layers_per_stage=[2,0]", "--data.max_ngram=0"]
        )
    assert caught.value.problems == [
        "data.max_ngram is 0; it must be at least 1",
        "batch.micro_size is 0; it must be at least 1",
        "parallel.layers_per_stage[1] is 0; it must be at least 1",
    ]


def test_parts_of_lists_and_mappings_have_bounds() -> None:
    default = BertPretrainConfig()
    problems = bound_problems(replace(default.data, blend={"a": 1.0, "b": 0.0}), "data")
    assert problems == ["data.blend.b is 0.0; it must be above 0"]
    assert bound_problems(replace(default.optimizer, betas=(0.9, 1.0))) == [
        "betas[1] is 1.0; it must be at least 0 and below 1"
    ]


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
