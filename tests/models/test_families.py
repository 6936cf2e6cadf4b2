"""Decoders of every family against transformers: weights, logits, gradients, and stretched rotary frequencies."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megapipe.checkpoint.hugging_face import correspondences
from megapipe.config.rope import RopeScaling
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.embedding import attention_factor, inverse_frequencies
from megapipe.spec.family import FamilyError, family_of
from tests.layers.bound import BoundLayer, bind_weights, make_context, run
from tests.models.hugging_face import CONFIGS, case_of, check_gradients, loss_of, opened

PATHS = ["auto", pytest.param("unfused", marks=pytest.mark.exhaustive)]


def check_logits(layers: list[BoundLayer], theirs: nn.Module, context: MicrobatchContext, tolerance: float) -> None:
    with torch.no_grad():
        expected = theirs(context.tokens).logits
        logits = run(layers, replace(context, labels=None))
    assert 0.5 < expected.std() < 50.0
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def check_loss(layers: list[BoundLayer], theirs: nn.Module, context: MicrobatchContext, tolerance: float) -> None:
    """And gradients."""
    expected_loss = loss_of(theirs(context.tokens).logits, context)
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=tolerance, atol=0.0)
    check_gradients(theirs, layers, tolerance)


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


def drawn_scaling(draw: random.Random, kind: str, pairs: int) -> tuple[RopeScaling, dict[str, Any]]:
    """A random scaling, and transformers' rope_parameters of it."""
    length, factor = draw.choice([64, 2048, 8192]), draw.choice([1.0, 2.0, 3.7, 32.0])
    fields: dict[str, Any] = {"original_length": length}
    if kind == "longrope":
        fields |= {f"{name}_factor": [draw.uniform(1, 60) for _ in range(pairs)] for name in ("short", "long")}
    choices = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}
    for name, value in {"attention_factor": 1.5, **(choices if kind == "yarn" else {})}.items():
        if kind in ("yarn", "longrope") and draw.random() < 0.5:
            fields[name] = value
    theirs = {name: value for name, value in fields.items() if name != "original_length"}
    if kind in ("yarn", "longrope", "llama3"):
        theirs["original_max_position_embeddings"] = length
    if kind == "llama3":
        theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return RopeScaling(kind=kind, factor=factor, **fields), {"rope_type": kind, "factor": factor, **theirs}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic", "yarn", "longrope"])
def test_stretched_frequencies_are_those_of_transformers(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(40):
        head, fraction, theta = draw.choice([16, 64, 128]), draw.choice([1.0, 0.5, 0.25]), draw.choice([500.0, 1e6])
        channels = int(head * fraction)
        scaling, parameters = drawn_scaling(draw, kind, channels // 2)
        config = transformers.LlamaConfig(
            hidden_size=4 * head,
            num_attention_heads=4,
            head_dim=head,
            max_position_embeddings=scaling.original_length,
            rope_parameters={**parameters, "rope_theta": theta, "partial_rotary_factor": fraction},
        )
        assert not scaling.problems(theta, channels)
        for num_tokens in (scaling.original_length, scaling.original_length + 1, 3 * scaling.original_length):
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=num_tokens)
            actual = inverse_frequencies(channels, theta, scaling, num_tokens)
            torch.testing.assert_close(actual, expected.double(), rtol=2e-6, atol=0.0)
            assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)
