"""Kinds of layers: which block has which fields, and what is refused in one line."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.load import parse
from megapipe.config.model import OF_BLOCKS, ModelConfig
from megapipe.spec.layers import tensor_problems

LOCAL = {"local": {"sliding_window": 4, "rope_theta": 3e4}}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["none", "rotary", "x", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["kind", "factor", "x"]), inner),
    max_leaves=4,
)


def model_with(kinds: Any, pattern: tuple[str, ...], **fields: Any) -> ModelConfig:
    return ModelConfig(layer_kinds=kinds, layer_pattern=pattern, **fields)


def test_a_pattern_repeats_over_the_blocks() -> None:
    words = ["--model.layer_kinds", yaml.safe_dump(LOCAL), "--model.layer_pattern", "[local, local, base]"]
    model = parse(words).model
    assert model.problems() == []
    blocks = [model.of_kind(model.kind_of_layer(index)) for index in range(model.num_layers)]
    assert [each.sliding_window for each in blocks] == [4, 4, None] * 4
    assert {each.rope_theta for each in blocks[::3]} == {3e4}
    assert blocks[2] == ModelConfig()


def test_a_model_without_pattern_is_its_own_kind() -> None:
    model = ModelConfig()
    assert model.of_kind(model.kind_of_layer(3)) is model
    assert list(model.kinds_of_layers.values()) == [model]


@pytest.mark.parametrize(
    ("kinds", "pattern", "message"),
    [
        (LOCAL, "local globl", "model.layer_pattern has 'globl', which is not a kind of layer; use one of base, l"),
        (LOCAL, "", "model.layer_kinds has 'local', which model.layer_pattern does not use"),
        (LOCAL, 13 * "local ", "model.layer_pattern has 13 entries, but model.num_layers is 12"),
        ({"base": {}}, "base", "model.layer_kinds has 'base', the name of the model's own fields"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(kinds: Any, pattern: str, message: str) -> None:
    (problem,) = model_with(kinds, tuple(pattern.split())).problems()
    assert message in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 8}, "model.layer_kinds a sets 'hidden_size', which cannot differ between"),
        ({"sliding_window": 0}, "model.layer_kinds a: sliding_window is 0, but must be a whole number"),
        ({"qk_norm": 1}, "model.layer_kinds a: qk_norm is 1, but must be true or false"),
        ({"activation": "x"}, "model.layer_kinds a: activation is 'x', but must be one of gelu"),
        ({"positions": "none"}, "model.layer_kinds a: positions is 'none' and model.positions is 'learn"),
        ({"rope_scaling": {"x": 1}}, "model.layer_kinds a: rope_scaling is {'x': 1}, but must be a map"),
        ({"rope_scaling": {"factor": -1}}, "rope_scaling.factor is -1, but must be a number above 0"),
        ({"num_heads": 5}, "is not divisible by model.num_heads 5; change one of them, or set model.head"),
    ],
)
def test_kinds_that_make_no_sense_are_refused(fields: Any, message: str) -> None:
    (problem,) = model_with({"a": fields}, ("a",)).problems()
    assert message in problem
    assert "\n" not in problem


@given(field=st.sampled_from(sorted(OF_BLOCKS)), value=ANY)
def test_any_value_of_a_file_works_or_fails_clearly(field: str, value: Any) -> None:
    model = model_with({"a": {field: value}}, ("a", "base"), positions="rotary")
    problems = model.problems()
    assert all("\n" not in each for each in problems)
    if not problems:
        assert [each.problems() for each in model.kinds_of_layers.values()] == [[], []]


def test_rules_between_groups_look_at_every_kind() -> None:
    experts = ["--model.layer_kinds", "{moe: {num_experts: 4}}", "--model.layer_pattern", "[base, moe]"]
    config = parse([*experts, "--training.compile", "true", "--model.num_heads", "3"])
    assert any("training.compile cannot be combined with model.num_experts 4" in each for each in config.problems())
    assert any("model.num_experts 4 is not divisible" in each for each in tensor_problems(config.model, 3))
