"""Saved bytes in the closed forms of the papers, and bytes of a unit's state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.units import Unit, UnitCosts
from megapipe.optim.muon import make_optimizer
from megapipe.spec.layers import model_layers
from megapipe.spec.ops import Precision
from tests.spec.sizes import predicted_bytes


@given(st.integers(1, 4), st.integers(1, 128), st.sampled_from([4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_a_block_equals_korthikantis_formula(micro: int, sequence: int, heads: int, tensor: int) -> None:
    """arXiv 2205.05198, equations 1 and 2; ours adds the statistics of two layer norms, 8 bytes a row each."""
    hidden = 16 * heads
    model = ModelConfig(num_layers=1, hidden_size=hidden, num_heads=heads, attention_dropout=0.1, hidden_dropout=0.1)
    kept = predicted_bytes(model, model_layers(model)[1], micro, sequence, "bf16", "unfused", tensor=tensor)
    sbh = sequence * micro * hidden
    formula = sbh * (10 + 24 / tensor + 5 * heads * sequence / (hidden * tensor))
    assert kept == formula + 2 * 8 * sequence * micro


@given(st.integers(1, 4), st.integers(1, 128), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]))
def test_weight_halves_equal_the_formula_of_zero_bubble(micro: int, sequence: int, heads: int, tensor: int) -> None:
    """arXiv 2401.10241, table 1: 32 s b h; ours adds inputs and gradients of two norms, 8 s b h, and their statistics.
    Tensor ranks shard the 24 s b h of the products, not the 8 of the residual stream."""
    model = ModelConfig(num_layers=1, hidden_size=16 * heads, num_heads=heads)
    kept = predicted_bytes(model, model_layers(model)[1], micro, sequence, "bf16", tensor=tensor, halves=True)
    sbh = sequence * micro * model.hidden_size
    assert kept == sbh * (24 // tensor + 8) + sbh * 8 + 2 * 8 * sequence * micro


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_block_of_sequence_shards_equals_korthikantis_table(tensor: int) -> None:
    """arXiv 2205.05198, table 2: s b h / t (34 + 5 a s / h) bytes; ours adds the statistics of two norms."""
    hidden, heads, length, micro = 1024, 16, 512, 2
    dropout = {"hidden_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
    model = ModelConfig(num_layers=1, hidden_size=hidden, num_heads=heads, **dropout)
    block = model_layers(model)[1]
    kept = predicted_bytes(model, block, micro, length, "bf16", "unfused", tensor=tensor, sequence_parallel=True)
    scores = 5 * heads * length / hidden
    assert kept == length * micro * (hidden * (34 + scores) + 16) / tensor


def test_a_head_keeps_padded_logits() -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=8, normalization="rms_norm")
    kept = predicted_bytes(model, model_layers(model)[-1], 3, 16, "bf16", "sdpa", tensor=2, alignment=8)
    assert kept == 3 * 16 * (2 * 64 * 2 + 4 + 2 * 56)


@pytest.mark.parametrize(
    ("precision", "versions", "per_parameter"), [("fp32", 1, 16), ("fp32", 2, 20), ("bf16", 1, 18), ("bf16", 2, 20)]
)
def test_state_per_parameter(precision: Precision, versions: int, per_parameter: int) -> None:
    model = ModelConfig(vocabulary_size=128, num_layers=2, hidden_size=64, num_heads=4)
    specs = tuple({spec.name: spec for layer in model_layers(model) for spec in layer.parameters.values()}.values())
    state = unit_costs(precision).state(Unit(specs), num_versions=versions)
    assert state.total == per_parameter * sum(spec.num_elements for spec in specs)
    assert state.total == state.weights + state.master + state.gradients + state.moments


def unit_costs(precision: Precision = "fp32", **fields: Any) -> UnitCosts:
    config = PretrainConfig()
    return UnitCosts(replace(config, training=replace(config.training, precision=precision)), replicas=1, **fields)


@pytest.mark.parametrize(
    ("optimizer", "torchs"),
    [
        (OptimizerConfig(), torch.optim.AdamW),
        (OptimizerConfig(name="sgd", momentum=0.9), lambda leaves: torch.optim.SGD(leaves, momentum=0.9)),
        (OptimizerConfig(name="sgd"), torch.optim.SGD),
    ],
)
def test_moments_are_those_that_the_optimizer_keeps(
    optimizer: OptimizerConfig, torchs: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    word = model_layers(ModelConfig(num_layers=1))[0].parameters["word.weight"]
    weight = torch.ones(word.shape, requires_grad=True)
    stepped = torchs([weight])
    weight.sum().backward()
    stepped.step()
    kept = [value for value in stepped.state[weight].values() if value is not None and value.shape == weight.shape]
    costs = UnitCosts(PretrainConfig(optimizer=optimizer), replicas=1, alignment=1)
    state = costs.state(Unit((word,)))
    assert state.moments == sum(value.nbytes for value in kept)
    assert len(make_optimizer(optimizer).moment_names) == optimizer.num_moments()


def test_tied_tables_count_padding_and_an_accumulator_per_use() -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=32, num_heads=4)
    word = model_layers(model)[0].parameters["word.weight"]
    config = PretrainConfig()
    config.parallel.tensor = 2
    costs = UnitCosts(config, replicas=1, alignment=8)
    once, twice = (costs.state(Unit((word,), tied=True, uses=uses)) for uses in (1, 2))
    assert once.weights == once.gradients == 56 * 32 * 4
    assert twice.gradients - once.gradients == 56 * 32 * 4
    assert (twice.weights, twice.moments) == (once.weights, once.moments)
