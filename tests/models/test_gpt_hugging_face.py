"""GPT against Hugging Face transformers: same weights, same logits, same gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.models.gpt_hugging_face import WeightMappingError, from_hugging_face, to_hugging_face
from tests.layers.bound import BoundLayer, all_gradients, bind_model, make_context, run
from tests.models.hugging_face import CASES, Case, gpt2, llama, qwen2


def load(layers: list[BoundLayer], tensors: dict[str, Tensor]) -> None:
    """Copy canonical tensors into the bound parameters."""
    names = set()
    for layer in layers:
        for name, parameter in layer.parameters().items():
            parameter.copy_(tensors[name])
            names.add(name)
    assert names == set(tensors)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.mark.parametrize("path", ["sdpa", "unfused"])
def test_logits_agree(case: Case, path: str) -> None:
    model = replace(case.model, attention=path)
    layers = bind_model(model)
    load(layers, from_hugging_face(case.theirs.state_dict(), model, case.family))
    context = make_context(model, batch=3, length=40)
    with torch.no_grad():
        expected = case.theirs(context.tokens).logits
        logits = run(layers, replace(context, labels=None))
    assert 0.5 < expected.std() < 50.0
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("path", ["sdpa", "unfused"])
def test_loss_and_gradients_agree_in_double(case: Case, path: str) -> None:
    """In float64, where the two differ by rounding alone: 1e-5 of a gradient's norm would hide a lost term."""
    model = replace(case.model, attention=path)
    theirs = case.theirs.double()
    layers = bind_model(model, dtype=torch.float64)
    load(layers, from_hugging_face(theirs.state_dict(), model, case.family))
    context = make_context(model, batch=3, length=40)
    logits = theirs(context.tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="none")
    expected_loss = (losses * context.loss_mask.flatten()).sum()
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    # transformers keeps rotary angles and norms in fp32 whatever the model's dtype.
    tolerance = 1e-10 if case.family == "gpt2" else 1e-5
    assert torch.allclose(loss, expected_loss, rtol=tolerance, atol=0.0)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = from_hugging_face(gradients, model, case.family)
    found = all_gradients(layers)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("shape", [gpt2, llama], ids=lambda shape: shape.__name__)
def test_gradients_agree_in_single(shape: type) -> None:
    case = shape()
    layers = bind_model(case.model)
    load(layers, from_hugging_face(case.theirs.state_dict(), case.model, case.family))
    context = replace(make_context(case.model, batch=3, length=40), loss_mask=None)
    logits = case.theirs(context.tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="sum").backward()
    run(layers, context).backward()
    gradients = {name: parameter.grad for name, parameter in case.theirs.named_parameters()}
    for name, gradient in from_hugging_face(gradients, case.model, case.family).items():
        assert (all_gradients(layers)[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_weights_come_back_as_they_went(case: Case) -> None:
    state = case.theirs.state_dict()
    ours = from_hugging_face(state, case.model, case.family)
    back = to_hugging_face(ours, case.model, case.family)
    parameters = {name for name, _ in case.theirs.named_parameters()}
    assert back.keys() == parameters
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name]), name


def test_a_missing_tensor_is_named() -> None:
    case = gpt2()
    state = dict(case.theirs.state_dict())
    del state["transformer.h.1.attn.c_attn.weight"]
    with pytest.raises(WeightMappingError, match=r"blocks\.1\.attention\.qkv\.weight needs"):
        from_hugging_face(state, case.model, "gpt2")


def test_a_left_over_tensor_is_named() -> None:
    case = qwen2()
    with pytest.raises(WeightMappingError, match=r"q_proj\.bias.*check bias"):
        from_hugging_face(case.theirs.state_dict(), replace(case.model, bias="none"), "qwen2")


def test_a_wrong_shape_is_named() -> None:
    case = gpt2()
    with pytest.raises(WeightMappingError, match=r"wte\.weight.*\(97, 64\).*\(98, 64\)"):
        from_hugging_face(case.theirs.state_dict(), replace(case.model, vocabulary_size=98), "gpt2")


def test_a_shape_that_the_family_cannot_hold_is_refused() -> None:
    case = gpt2()
    with pytest.raises(WeightMappingError, match=r"llama weights have no tensor for embedding\.position\.weight"):
        to_hugging_face({}, case.model, "llama")
    with pytest.raises(WeightMappingError, match=r"gpt2 weights have no tensor for blocks\.0\.mlp\.up\.weight"):
        to_hugging_face({}, replace(case.model, activation="swiglu"), "gpt2")


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(WeightMappingError, match="did you mean 'mistral'"):
        to_hugging_face({}, gpt2().model, "mistrel")  # type: ignore[arg-type]
