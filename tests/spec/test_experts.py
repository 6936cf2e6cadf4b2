"""Costs of blocks with experts, beside published figures, what torch counts, and what the layers themselves keep."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.load import parse
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.graph import gradient_edge
from megapipe.layers.split import SplitTape
from megapipe.models.gpt import Block
from megapipe.spec.layers import active_parameters, layer_flops, model_flops_per_token, model_layers, tensor_problems
from tests.spec.sizes import predicted_bytes
from tests.spec.test_memory_measured import DTYPES, LLAMA, SEQUENCE, bound_layer, shared_bytes

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA}
SIZES: dict[str, Any] = {"vocabulary_size": 101, "num_layers": 1, "hidden_size": 64, "num_heads": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "ffn_hidden_size": 96}
PARTS: list[list[RecomputedPart]] = [[], ["mlp"], ["attention", "mlp", "norms"]]


def test_a_token_of_mixtral_uses_the_published_share_of_its_parameters() -> None:
    """47 billion of which 13 billion are used (arXiv 2401.04088, abstract)."""
    path = ROOT / "examples/models/mixtral_8x7b.yaml"
    model = parse(["--model", str(path)]).model
    layers = model_layers(model)
    active = active_parameters(model, layers)
    assert round(active / 1e9) == 13
    assert f"A token uses {active:,} of them" in path.read_text()
    dense = replace(model, num_experts=None)
    assert active_parameters(dense, model_layers(dense)) == sum(
        spec.num_elements for layer in model_layers(dense) for spec in layer.parameters.values()
    )


def test_two_of_eight_experts_compute_as_an_mlp_of_twice_the_width_does() -> None:
    """But for the router. All experts of one block, were each used, would be the whole."""
    sizes: dict[str, Any] = {**SIZES, **LLAMA, "num_kv_heads": 4, "ffn_hidden_size": 96}
    model = ModelConfig(**sizes, num_experts=8)
    wide = ModelConfig(**{**sizes, "ffn_hidden_size": 192})
    found, expected = (layer_flops(each, model_layers(each)[1], 3, 32) for each in (model, wide))
    router = 2 * 3 * 32 * 64 * 8
    assert found.forward == expected.forward + router
    assert found.backward_input == expected.backward_input + router
    assert found.backward_weight == expected.backward_weight + router
    assert model_flops_per_token(model, model_layers(model), 32) > model_flops_per_token(wide, model_layers(wide), 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_what_torch_counts_in_the_layer(shape: str) -> None:
    model = ModelConfig(**SIZES, **SHAPES[shape], **EXPERTS, attention="unfused")
    layer = model_layers(model)[1]
    module = with_drawn_weights(bound_layer(model, layer, torch.float32))
    hidden = torch.randn(3, SEQUENCE, 64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        (output,) = module(hidden, context=MicrobatchContext(ordinals=torch.arange(3)))
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    expected = layer_flops(model, layer, 3, SEQUENCE)
    assert forward.get_total_flops() == expected.forward
    assert backward.get_total_flops() == expected.backward_input + expected.backward_weight


def with_drawn_weights(module: nn.Module) -> nn.Module:
    """Tokens then choose different experts."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(number))
    return module


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_keeps_what_is_predicted(
    shape: str, parts: list[RecomputedPart], normalize: bool, precision: Literal["fp32", "bf16"]
) -> None:
    """Numbers of rows and experts too. On one rank, every choice is a row, whatever the experts."""
    model = ModelConfig(
        **SIZES,
        **SHAPES[shape],
        **EXPERTS,
        attention="sdpa",
        normalize_expert_shares=normalize,
        expert_balance_rate=0.0,
    )
    layer = model_layers(model)[1]
    module = with_drawn_weights(bound_layer(model, layer, DTYPES[precision]))
    assert isinstance(module, Block)
    module.recompute(parts)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    context = MicrobatchContext(ordinals=torch.arange(3))
    hidden = torch.randn(3, SEQUENCE, 64, dtype=DTYPES[precision], requires_grad=True)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(hidden, context=context)
    kept = sum(each.untyped_storage().nbytes() for address, each in saved.items() if address not in weights)
    predicted = predicted_bytes(model, layer, 3, SEQUENCE, precision, "sdpa", recompute=parts)
    assert kept - shared_bytes(model, layer) == predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_predicted_waits_for_a_weight_half(
    shape: str, parts: list[RecomputedPart], precision: Literal["fp32", "bf16"]
) -> None:
    model = ModelConfig(**SIZES, **SHAPES[shape], **EXPERTS, attention="unfused", hidden_dropout=0.1)
    layer = model_layers(model)[1]
    module = with_drawn_weights(bound_layer(model, layer, DTYPES[precision]))
    assert isinstance(module, Block)
    module.recompute(parts)
    tape = SplitTape()
    hidden = torch.randn(3, SEQUENCE, 64, dtype=DTYPES[precision], requires_grad=True)
    (output,) = module(hidden, context=MicrobatchContext(ordinals=torch.arange(3), tape=tape))
    tape.backward_input([gradient_edge(output)], [torch.ones_like(output)], [hidden])
    kept: dict[int, Tensor] = {t.untyped_storage().data_ptr(): t for t in tape.kept if t.is_floating_point()}
    predicted = predicted_bytes(model, layer, 3, SEQUENCE, precision, recompute=parts, halves=True)
    assert sum(each.untyped_storage().nbytes() for each in kept.values()) == predicted


def test_tensor_ranks_share_whole_experts_and_any_width() -> None:
    model = ModelConfig(hidden_size=96, num_heads=12, ffn_hidden_size=100, num_experts=6)
    assert tensor_problems(model, 3) == []
    assert tensor_problems(model, 4) == [
        "model.num_experts 6 is not divisible by parallel.tensor 4; tensor sizes that divide this model: 1, 2, 3, 6"
    ]
