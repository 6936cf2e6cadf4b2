"""Layers of a GPT bound to real memory on one tensor rank, runs through them, and halves of their backward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape
from megapipe.models import build_layer
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.unit_state import UnitState, free
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec

VOCABULARY = 61
GPT2 = {"activation": "gelu_tanh"}
LLAMA = {
    "normalization": "rms_norm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": "none",
    "num_kv_heads": 2,
    "tie_embeddings": False,
}
QWEN3 = {**LLAMA, "qk_norm": True, "sliding_window": 5, "head_size": 16}
LATENT, ROTATED = 12, 4
LATENTS = {**LLAMA, "num_kv_heads": None, "kv_latent_size": LATENT, "rotary_head_size": ROTATED}
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}


def small_model(**fields: object) -> ModelConfig:
    """Two blocks of hidden size 32 with weights large enough for every part to matter."""
    sizes = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_positions": 16}
    return ModelConfig(**{**sizes, "init_std": 0.2, "scale_residual_init": False, **fields})  # type: ignore[arg-type]


@dataclass
class BoundLayer:
    """A layer's module with its parameters in a UnitState."""

    spec: LayerSpec
    module: nn.Module
    state: UnitState

    def gradients(self) -> dict[str, Tensor]:
        """This rank's owned part of every parameter's gradient, by global name."""
        flat = self.state.gradients[0]
        return {s.spec.name: self.state.owned_view(flat, s).clone() for s in self.state.table}

    def parameters(self) -> dict[str, Tensor]:
        """This rank's owned part of every parameter, by global name: views to read and write."""
        return {s.spec.name: self.state.owned_view(self.state.weights[0], s) for s in self.state.table}


def bind(
    spec: LayerSpec,
    model: ModelConfig,
    group: Group | None = None,
    dtype: torch.dtype = torch.float32,
    alignment: int = 1,
    seed: int = 1,
    recompute_logits: bool = False,
) -> BoundLayer:
    """One layer with initial weights; biases and norm weights are drawn as well, so that none is neutral."""
    group = group or SoloGroup("tensor")
    state = UnitState(
        spec.name,
        dict.fromkeys(spec.parameters.values()),
        compute_dtype=dtype,
        tensor_rank=group.rank,
        tensor_size=group.size,
        alignment=alignment,
    )
    state.initialize(seed)
    for segment in state.table:
        if segment.spec.init.kind != "normal":
            whole = torch.empty(segment.spec.shape).normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.1)
            box = tuple(slice(a, b) for a, b in zip(segment.box.starts, segment.box.stops, strict=True))
            state.owned_view(state.weights[0], segment).add_(whole[box])
    module = build_layer(spec, model, group, alignment, recompute_logits=recompute_logits)
    state.bind(module, spec.parameters)
    return BoundLayer(spec, module, state)


def bind_model(model: ModelConfig, **how: object) -> list[BoundLayer]:
    """Every layer of a model; see `bind`."""
    return [bind(spec, model, **how) for spec in model_layers(model)]  # type: ignore[arg-type]


def make_context(model: ModelConfig, batch: int = 2, length: int = 12) -> MicrobatchContext:
    """Random tokens and labels, an uneven loss mask, and ordinals on both sides of 2**32."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(model.vocabulary_size, (batch, length + 1), generator=generator)
    mask = (torch.rand(batch, length, generator=generator) < 0.7).float()
    ordinals = torch.arange(batch) * 2**32 + 5
    return MicrobatchContext(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, ordinals, seed=2**40 + 9)


def bind_weights(model: ModelConfig, weights: dict[str, Tensor], **how: object) -> list[BoundLayer]:
    """Every layer of a model with these canonical tensors."""
    layers = bind_model(model, **how)
    load(layers, weights)
    return layers


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same ones in any dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(layers: Sequence[BoundLayer], context: MicrobatchContext, *inputs: Tensor) -> Tensor:
    """Loss sum, or logits without labels."""
    hidden = inputs
    for layer in layers:
        hidden = layer.module(*hidden, context=context)
    return hidden[0]


def all_gradients(layers: Sequence[BoundLayer]) -> dict[str, Tensor]:
    """Gradients by global name, the uses of a tied weight added up."""
    total: dict[str, Tensor] = {}
    for layer in layers:
        for name, gradient in layer.gradients().items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def load(layers: list[BoundLayer], tensors: dict[str, Tensor]) -> None:
    """Copy canonical tensors into the bound parameters."""
    names = set()
    for layer in layers:
        for name, parameter in layer.parameters().items():
            parameter.copy_(tensors[name])
            names.add(name)
    assert names == set(tensors)


def check_halves(
    layers: Sequence[BoundLayer],
    context: MicrobatchContext,
    inputs: Sequence[Tensor] = (),
    upstream: Tensor | None = None,
    recompute: Any = (),
) -> None:
    """Compare the two halves of a backward with the fused one, bit for bit. The input half must not touch parameters'
    gradients, nor the weight half need weights, which are released by then where they are sharded.

    upstream: the output's gradient, by default ones. recompute: what the split backward recomputes.
    """

    def forward(tape: SplitTape | None) -> tuple[Tensor, list[Tensor]]:
        leaves = [each.clone().requires_grad_() for each in inputs]
        return run(layers, replace(context, tape=tape), *leaves), leaves

    output, leaves = forward(None)
    upstream = torch.ones_like(output) if upstream is None else upstream
    output.backward(upstream)
    fused = [output.detach(), *(leaf.grad for leaf in leaves), *(layer.state.gradients[0].clone() for layer in layers)]
    for layer in layers:
        layer.state.zero_gradients()
        if recompute:
            layer.module.recompute(recompute)
    tape = SplitTape()
    output, leaves = forward(tape)
    input_gradients = tape.backward_input([output], [upstream], leaves)
    assert not any(layer.state.gradients[0].any() for layer in layers), "the input half touched a parameter's gradient"
    for layer in layers:
        free(layer.state.weights[0])
    tape.backward_weight()
    halves = [output.detach(), *input_gradients, *(layer.state.gradients[0] for layer in layers)]
    for half, whole in zip(halves, fused, strict=True):
        assert whole.any()
        assert torch.equal(half, whole)
