import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.model import ModelConfig
from megapipe.layers.context import MicrobatchContext
from megapipe.models.gpt import build_layer
from megapipe.parallel.groups import SoloGroup
from megapipe.spec.layers import layer_flops, model_flops_per_token, model_layers
from megapipe.spec.ops import Flops


def gpt(heads: int, hidden: int, layers: int, vocabulary: int = 51200, sequence: int = 2048) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=vocabulary,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        max_positions=sequence,
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
    formula = (
        96
        * micro
        * sequence
        * layers
        * hidden**2
        * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    assert with_recomputation == pytest.approx(formula, rel=1e-12)
    assert model_flops_per_token(model, parts, sequence) * micro * sequence == sum(part.total for part in flops)


def test_the_145_billion_model_takes_its_published_flops_per_iteration() -> None:
    model = gpt(96, 12288, 80)
    flops = [layer_flops(model, layer, 1, 2048) for layer in model_layers(model)]
    iteration = 2304 * (sum(part.total for part in flops) + sum(part.forward for part in flops[1:-1]))
    assert iteration == pytest.approx(5.642e18, rel=1e-3)


def matmul_flops(model: ModelConfig, micro: int, sequence: int) -> tuple[int, int]:
    """(forward, backward) of a block's products and head, counted by torch as they are dispatched on meta tensors."""
    parts = model_layers(model)
    block, head = parts[1].parameters, parts[-1].parameters
    with torch.device("meta"):
        weights = {
            name: torch.empty(block[f"{name}.weight"].shape, requires_grad=True)
            for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
        }
        output = torch.empty(head["output.weight"].shape, requires_grad=True)
        hidden = torch.empty(micro, sequence, model.hidden_size, requires_grad=True)
        groups = model.num_heads // model.kv_heads
        with FlopCounterMode(display=False) as forward:
            qkv = hidden @ weights["attention.qkv"].flatten(0, -2).t()
            qkv = qkv.view(micro, sequence, model.kv_heads, groups + 2, model.head_dim).permute(0, 2, 3, 1, 4)
            query, key, value = qkv.split([groups, 1, 1], dim=2)
            scores = query @ key.expand_as(query).transpose(-1, -2)
            attended = (scores @ value.expand_as(query)).permute(0, 3, 1, 2, 4).flatten(2)
            hidden = attended @ weights["attention.output"].t()
            inner = hidden @ weights["mlp.up"].flatten(0, -2).t()
            if model.activation == "swiglu":
                gate, inner = inner.chunk(2, dim=-1)
                inner = inner * gate
            logits = inner @ weights["mlp.down"].t() @ output.t()
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("head_size", [None, 24])
def test_equals_what_torch_counts(activation: str, kv_heads: int | None, head_size: int | None) -> None:
    model = ModelConfig(
        vocabulary_size=1000,
        num_layers=1,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_size=head_size,
        activation=activation,  # type: ignore[arg-type]
        tie_embeddings=False,
    )
    parts = [layer_flops(model, layer, 3, 32) for layer in model_layers(model)]
    forward, backward = matmul_flops(model, 3, 32)
    assert sum(part.forward for part in parts) == forward
    assert sum(part.backward_input + part.backward_weight for part in parts) == backward


def test_causal_attention_is_counted_in_full_as_torch_counts_it() -> None:
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


def test_the_embedding_multiplies_nothing_and_tying_changes_nothing() -> None:
    tied, untied = gpt(4, 64, 2), gpt(4, 64, 2)
    untied.tie_embeddings = False
    assert layer_flops(tied, model_layers(tied)[0], 1, 16).total == 0
    assert model_flops_per_token(tied, model_layers(tied), 16) == model_flops_per_token(
        untied, model_layers(untied), 16
    )


def test_recomputed_logits_are_work_but_not_the_models() -> None:
    model = gpt(4, 64, 1)
    head = model_layers(model)[-1]
    kept, recomputed = (layer_flops(model, head, 3, 32, recompute_logits=again) for again in (False, True))
    assert kept.total == kept.executed == recomputed.total
    module = build_layer(head, model, SoloGroup("tensor"), recompute_logits=True)
    for name, spec in (("norm.weight", (64,)), ("norm.bias", (64,)), ("output.weight", (model.vocabulary_size, 64))):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(torch.zeros(spec)))
    labels = torch.zeros(3, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        (loss,) = module(torch.zeros(3, 32, 64, requires_grad=True), context=MicrobatchContext(labels=labels))
        loss.backward()
    assert recomputed.executed == counter.get_total_flops()
    block = model_layers(model)[1]
    assert layer_flops(model, block, 3, 32, recompute_logits=True) == layer_flops(model, block, 3, 32)
