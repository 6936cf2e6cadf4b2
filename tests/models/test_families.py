"""Decoders of every family against transformers: same weights, same logits, same gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megapipe.checkpoint.hugging_face import correspondences
from megapipe.layers.context import MicrobatchContext
from megapipe.spec.family import FamilyError, family_of
from tests.layers.bound import BoundLayer, all_gradients, bind_weights, make_context, run
from tests.models.hugging_face import CONFIGS, case_of, gradients_of, most_exhaustive, opened

PATHS = ["auto", pytest.param("unfused", marks=pytest.mark.exhaustive)]


def check_logits(layers: list[BoundLayer], theirs: nn.Module, context: MicrobatchContext, tolerance: float) -> None:
    with torch.no_grad():
        expected = theirs(context.tokens).logits
        logits = run(layers, replace(context, labels=None))
    assert 0.5 < expected.std() < 50.0
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def check_loss(layers: list[BoundLayer], theirs: nn.Module, context: MicrobatchContext, tolerance: float) -> None:
    """And gradients."""
    logits = theirs(context.tokens).logits
    losses = cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="none")
    expected_loss = (losses * context.loss_mask.flatten()).sum()
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=tolerance, atol=0.0)
    expected, actual = gradients_of(theirs), all_gradients(layers)
    trained = {name for name in actual if not name.endswith("router.bias")}
    assert trained == expected.keys() & trained
    for name in trained:
        assert expected[name].norm() > 0, name
        assert (actual[name] - expected[name]).norm() <= tolerance * expected[name].norm(), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", most_exhaustive(CONFIGS))
def test_logits_agree_in_single(name: str, path: str) -> None:
    theirs = case_of(name).theirs
    model, weights = opened(theirs)
    layers = bind_weights(replace(model, attention=path), weights)
    context = make_context(model, batch=3, length=40)
    check_logits(layers, theirs, context, 1e-5)
    if name in ("gpt2", "llama"):
        check_loss(layers, theirs, context, 2e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_agree_in_double(name: str, path: str) -> None:
    """In float64, where the two differ by rounding alone: 1e-5 of a gradient's norm would hide a lost term."""
    case = case_of(name)
    theirs = case.theirs.double()
    model, weights = opened(theirs)
    layers = bind_weights(replace(model, attention=path), weights, dtype=torch.float64)
    context = make_context(model, batch=3, length=40)
    # Except in GPT-2, transformers computes rotary angles, norms and the router's softmax in fp32 in any dtype.
    tolerance = {"gpt2": 1e-10, "gemma": 2e-5}.get(case.family, 1e-5)
    check_logits(layers, theirs, context, tolerance)
    check_loss(layers, theirs, context, tolerance)


def test_a_parameter_without_a_place_is_named() -> None:
    model = case_of("llama").model
    for changes, path in (({"positions": "learned"}, "embedding.position"), ({"num_experts": 4}, "mlp.router")):
        with pytest.raises(FamilyError, match=f"llama weights have no tensor for .*{path}.weight"):
            correspondences(replace(model, **changes), family_of("llama"))
