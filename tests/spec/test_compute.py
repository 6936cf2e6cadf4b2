"""FLOPs in the closed forms of the papers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.load import parse
from megapipe.config.model import ModelConfig
from megapipe.spec.layers import active_parameters, layer_flops, model_flops_per_token, model_layers
from megapipe.spec.ops import Flops


def gpt(heads: int, hidden: int, layers: int, vocabulary: int = 51200, sequence: int = 2048) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=vocabulary, num_layers=layers, hidden_size=hidden, num_heads=heads, max_positions=sequence
    )


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16), st.integers(1, 64))
def test_a_gpt_block_equals_the_table_of_zero_bubble(micro: int, sequence: int, heads: int, head_dim: int) -> None:
    """arXiv 2401.10241, table 1: forward, backward for the input, backward for the weights."""
    hidden = heads * head_dim
    model = gpt(heads, hidden, 1)
    block = model_layers(model)[1]
    sbh = sequence * micro * hidden
    assert layer_flops(model, block, micro, sequence) == Flops(
        forward=sbh * (24 * hidden + 4 * sequence),
        backward_input=sbh * (24 * hidden + 8 * sequence),
        backward_weight=sbh * 24 * hidden,
    )


@given(st.integers(1, 8), st.integers(1, 512), st.integers(1, 16), st.integers(1, 48), st.integers(1, 50000))
def test_a_gpt_equals_megatrons_formula(micro: int, sequence: int, heads: int, layers: int, vocabulary: int) -> None:
    """arXiv 2104.04473, equation 3, which adds one more forward of the blocks, recomputed in the backward."""
    model = gpt(heads, 64 * heads, layers, vocabulary)
    parts = model_layers(model)
    flops = [layer_flops(model, layer, micro, sequence) for layer in parts]
    with_recomputation = sum(part.total for part in flops) + sum(part.forward for part in flops[1:-1])
    hidden = model.hidden_size
    terms = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    formula = 96 * micro * sequence * layers * hidden**2 * terms
    assert with_recomputation == pytest.approx(formula, rel=1e-12)
    assert model_flops_per_token(model, parts, sequence) * micro * sequence == sum(part.total for part in flops)


def test_the_145_billion_model_has_its_published_flops() -> None:
    model = gpt(96, 12288, 80)
    flops = [layer_flops(model, layer, 1, 2048) for layer in model_layers(model)]
    iteration = 2304 * (sum(part.total for part in flops) + sum(part.forward for part in flops[1:-1]))
    assert iteration == pytest.approx(5.642e18, rel=1e-3)


def test_causal_attention_is_counted_in_full_like_torch() -> None:
    model = gpt(4, 64, 1)
    query = torch.empty(2, 4, 128, 16, device="meta")
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(query, query, query, is_causal=True)
    projections = 24 * 2 * 128 * 64**2
    assert layer_flops(model, model_layers(model)[1], 2, 128).forward == projections + counter.get_total_flops()


def test_a_sliding_window_bounds_the_keys_of_a_query() -> None:
    wide, narrow = gpt(4, 64, 1), gpt(4, 64, 1)
    narrow.sliding_window = 32
    block = model_layers(wide)[1]
    assert layer_flops(narrow, block, 1, 32) == layer_flops(wide, block, 1, 32)
    saved = layer_flops(wide, block, 1, 128).forward - layer_flops(narrow, block, 1, 128).forward
    assert saved == 4 * 64 * 128 * (128 - 32)


def test_a_token_of_mixtral_uses_the_published_parameters() -> None:
    """47 billion of which 13 billion are used (arXiv 2401.04088, abstract)."""
    path = Path(__file__).resolve().parents[2] / "examples/models/mixtral_8x7b.yaml"
    model = parse(["--model", str(path)]).model
    active = active_parameters(model, model_layers(model))
    assert round(active / 1e9) == 13
    assert f"A token uses {active:,} of them" in path.read_text()
    dense = model_layers(replace(model, num_experts=None))
    every = sum(spec.num_elements for layer in dense for spec in layer.parameters.values())
    assert active_parameters(replace(model, num_experts=None), dense) == every
