"""Decoders of every family against transformers: same weights, same logits, same gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from megapipe.checkpoint.hugging_face import correspondences
from megapipe.spec.family import FamilyError, family_of
from tests.layers.bound import all_gradients, bind_model, load, make_context, run
from tests.models.hugging_face import CONFIGS, Case, case_of, gradients_of, opened

PATHS = ["auto", pytest.param("unfused", marks=pytest.mark.exhaustive)]


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.mark.parametrize("path", PATHS)
def test_logits_agree(case: Case, path: str) -> None:
    model, weights = opened(case.theirs)
    layers = bind_model(replace(model, attention=path))
    load(layers, weights)
    context = make_context(model, batch=3, length=40)
    with torch.no_grad():
        expected = case.theirs(context.tokens).logits
        logits = run(layers, replace(context, labels=None))
    assert 0.5 < expected.std() < 50.0
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("path", PATHS)
def test_loss_and_gradients_agree_in_double(case: Case, path: str) -> None:
    """In float64, where the two differ by rounding alone: 1e-5 of a gradient's norm would hide a lost term."""
    theirs = case.theirs.double()
    model, weights = opened(theirs)
    layers = bind_model(replace(model, attention=path), dtype=torch.float64)
    load(layers, weights)
    context = make_context(model, batch=3, length=40)
    logits = theirs(context.tokens).logits
    losses = cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="none")
    expected_loss = (losses * context.loss_mask.flatten()).sum()
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    # Except in GPT-2, transformers computes rotary angles, norms and the router's softmax in fp32 in any dtype.
    tolerance = {"gpt2": 1e-10, "gemma": 2e-5}.get(case.family, 1e-5)
    assert torch.allclose(loss, expected_loss, rtol=tolerance, atol=0.0)
    expected, actual = gradients_of(theirs), all_gradients(layers)
    trained = {name for name in actual if not name.endswith("router.bias")}
    assert trained == expected.keys() & trained
    for name in trained:
        assert expected[name].norm() > 0, name
        assert (actual[name] - expected[name]).norm() <= tolerance * expected[name].norm(), name


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_agree_in_single(name: str) -> None:
    theirs = case_of(name).theirs
    model, weights = opened(theirs)
    layers = bind_model(model)
    load(layers, weights)
    context = replace(make_context(model, batch=3, length=40), loss_mask=None)
    logits = theirs(context.tokens).logits
    cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="sum").backward()
    run(layers, context).backward()
    for name, gradient in gradients_of(theirs).items():
        assert (all_gradients(layers)[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_a_parameter_without_a_place_is_named() -> None:
    model = case_of("llama").model
    for changes, path in (({"positions": "learned"}, "embedding.position"), ({"num_experts": 4}, "mlp.router")):
        with pytest.raises(FamilyError, match=f"llama weights have no tensor for .*{path}.weight"):
            correspondences(replace(model, **changes), family_of("llama"))


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(FamilyError, match="did you mean 'mistral'"):
        family_of("mistrel")
