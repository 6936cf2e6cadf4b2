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
from megapipe.layout.units import Unit, UnitCosts, num_moments
from megapipe.optim.make import make_optimizer
from megapipe.spec.dtypes import Precision
from megapipe.spec.layers import model_layers
from tests.spec.sizes import message_bytes, predicted_bytes


@given(st.integers(1, 4), st.integers(1, 128), st.sampled_from([4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_a_block_equals_korthikantis_formula(micro: int, sequence: int, heads: int, tensor: int) -> None:
    """arXiv 2205.05198, equations 1 and 2; ours adds the statistics of two layer norms, 8 bytes a row each."""
    hidden = 16 * heads
    model = ModelConfig(num_layers=1, hidden_size=hidden, num_heads=heads, attention_dropout=0.1, hidden_dropout=0.1)
    kept = predicted_bytes(model, model_layers(model)[1], micro, sequence, "bf16", "unfused", tensor=tensor)
    sbh = sequence * micro * hidden
    formula = sbh * (10 + 24 / tensor + 5 * heads * sequence / (hidden * tensor))
    assert kept == formula + 2 * 8 * sequence * micro


def llama_like(**changes: object) -> ModelConfig:
    return ModelConfig(
        **{  # type: ignore[arg-type]
            "vocabulary_size": 101,
            "num_layers": 1,
            "hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 2,
            "ffn_hidden_size": 96,
            "normalization": "rms_norm",
            "activation": "swiglu",
            "positions": "rotary",
            "bias": "none",
            **changes,
        }
    )


def test_a_llama_block_tensor_by_tensor() -> None:
    micro, sequence = 2, 16
    tokens = micro * sequence
    model = llama_like()
    per_token = (
        4 * (64 + 64 + 64 + 64)  # inputs of two norms, of qkv and of gate/up
        + 2 * 4  # inverse roots
        + 4 * (64 + 16 + 16 + 64)  # query, key, value, result
        + 4 * (64 + 16)
        + 8 * 4  # query and key before the rotation, log-sums
        + 4 * (96 + 96 + 96)  # gate, up, product
    )
    block = model_layers(model)[1]
    assert predicted_bytes(model, block, micro, sequence, "fp32", "sdpa") == tokens * per_token
    unfused = predicted_bytes(model, block, micro, sequence, "fp32", "unfused")
    assert unfused == tokens * (per_token - 4 * (64 + 16) - 8 * 4 + 4 * 8 * sequence)
    normed = llama_like(qk_norm=True)
    with_norms = predicted_bytes(normed, model_layers(normed)[1], micro, sequence, "fp32", "sdpa")
    assert with_norms == tokens * (per_token + 4 * (8 + 2))


def test_tensor_ranks_share_what_they_compute_apart() -> None:
    model = llama_like()
    block = model_layers(model)[1]
    whole, half = (predicted_bytes(model, block, 1, 16, "bf16", "sdpa", tensor=size) for size in (1, 2))
    replicated = 16 * (4 * 64 * 2 + 2 * 4)
    assert whole - replicated == 2 * (half - replicated)


def test_the_head_keeps_its_inputs_and_the_gradient_of_its_padded_logits() -> None:
    model = llama_like()
    head = model_layers(model)[-1]
    tokens = 3 * 16
    assert predicted_bytes(model, head, 3, 16, "bf16", "sdpa") == tokens * (2 * 64 * 2 + 4 + 2 * 101)
    assert predicted_bytes(model, head, 3, 16, "bf16", "sdpa", tensor=2, alignment=8) == tokens * (
        2 * 64 * 2 + 4 + 2 * 56
    )


def test_the_embedding_keeps_a_dropout_mask_alone() -> None:
    for probability, kept in ((0.0, 0), (0.1, 2 * 16 * 64)):
        model = llama_like(embedding_dropout=probability)
        assert predicted_bytes(model, model_layers(model)[0], 2, 16, "bf16", "sdpa") == kept


def test_a_message_is_the_residual_stream() -> None:
    assert message_bytes(llama_like(), 2, 16, "fp32") == 2 * 16 * 64 * 4
    assert message_bytes(llama_like(), 2, 16, "bf16") == 2 * 16 * 64 * 2


@pytest.mark.parametrize(
    ("precision", "versions", "per_parameter"),
    [("fp32", 1, 16), ("fp32", 2, 20), ("bf16", 1, 18), ("bf16", 2, 20)],
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
    word = model_layers(llama_like())[0].parameters["word.weight"]
    weight = torch.ones(word.shape, requires_grad=True)
    stepped = torchs([weight])
    weight.sum().backward()
    stepped.step()
    kept = [value for value in stepped.state[weight].values() if value is not None and value.shape == weight.shape]
    costs = UnitCosts(PretrainConfig(optimizer=optimizer), replicas=1, alignment=1)
    state = costs.state(Unit((word,)))
    assert state.moments == sum(value.nbytes for value in kept)
    assert len(make_optimizer(optimizer).moment_names) == num_moments(optimizer)


def test_state_of_a_tied_table_counts_padding_and_one_accumulator_per_use() -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=32, num_heads=4)
    word = model_layers(model)[0].parameters["word.weight"]
    config = PretrainConfig()
    config.parallel.tensor = 2
    costs = UnitCosts(config, replicas=1, alignment=8)
    once, twice = (costs.state(Unit((word,), tied=True, uses=uses)) for uses in (1, 2))
    assert once.weights == once.gradients == 56 * 32 * 4
    assert twice.gradients - once.gradients == 56 * 32 * 4
    assert (twice.weights, twice.moments) == (once.weights, once.moments)
