"""A GPT with experts against transformers' Mixtral: same weights, same logits, same gradients."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.conversion.megatron_model import places
from megapipe.models.gpt_hugging_face import WeightMappingError, from_hugging_face, to_hugging_face
from tests.layers.bound import all_gradients, bind_model, make_context, run
from tests.models.hugging_face import mixtral
from tests.models.test_gpt_hugging_face import load


def as_files(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names that Mixtral's files have; tests/conversion has transformers write them."""
    found = {}
    for name, tensor in stacked.items():
        layer, _, path = name.partition(".mlp.")
        if path == "gate.weight":
            found[f"{layer}.block_sparse_moe.gate.weight"] = tensor
        elif path == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for leaf, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    found[f"{layer}.block_sparse_moe.experts.{expert}.{leaf}.weight"] = half
        elif path == "experts.down_proj":
            for expert, down in enumerate(tensor):
                found[f"{layer}.block_sparse_moe.experts.{expert}.w2.weight"] = down
        else:
            found[name] = tensor
    return found


def test_logits_loss_and_gradients_agree_in_double() -> None:
    """transformers keeps rotary angles, norms and the router's softmax in fp32 whatever the model's dtype."""
    case = mixtral()
    theirs = case.theirs.double()
    layers = bind_model(case.model, dtype=torch.float64)
    load(layers, from_hugging_face(as_files(theirs.state_dict()), case.model, "mixtral"))
    context = make_context(case.model, batch=3, length=40)
    logits = theirs(context.tokens).logits
    with torch.no_grad():
        found = run(layers, replace(context, labels=None))
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="none")
    expected_loss = (losses * context.loss_mask.flatten()).sum()
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=1e-5, atol=0.0)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = from_hugging_face(as_files(gradients), case.model, "mixtral")
    found_gradients = all_gradients(layers)
    assert found_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_weights_come_back_as_they_went() -> None:
    case = mixtral()
    state = as_files(case.theirs.state_dict())
    back = to_hugging_face(from_hugging_face(state, case.model, "mixtral"), case.model, "mixtral")
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(
    ("fields", "family", "what"),
    [
        ({"expert_balance_rate": 0.001}, "mixtral", r"mlp\.router\.bias"),
        ({"activation": "gelu"}, "mixtral", r"mlp\.up\.weight"),
        ({"num_experts": None}, "mixtral", r"mlp\.up\.weight"),
        ({"num_experts": None}, "ernie4_5_moe", r"mlp\.up\.weight"),
        ({"bias": "all"}, "ernie4_5_moe", r"mlp\.up\.bias"),
        ({}, "llama", r"mlp\.router\.weight"),
        ({}, "qwen3", r"mlp\.router\.weight"),
    ],
)
def test_what_a_family_has_no_place_for_is_named(fields: dict, family: str, what: str) -> None:
    model = replace(mixtral().model, **fields)
    with pytest.raises(WeightMappingError, match=f"{family} weights have no tensor for blocks.0.{what}"):
        to_hugging_face({}, model, family)  # type: ignore[arg-type]


def test_megatron_lm_has_no_place_for_experts() -> None:
    with pytest.raises(CheckpointError, match=r"model\.num_experts is 4; only dense models can be converted"):
        places(mixtral().model)
