"""A new activation or norm takes a row of a table and a reference kernel; its bytes follow from the ops."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ACTIVATIONS, NORMS, ActivationKind, ModelConfig, NormKind
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import REFERENCE, Backend, KernelOp, Registry
from megapipe.models.gpt import build_layer
from megapipe.spec.layers import model_layers
from tests.spec import test_memory_measured as counting
from tests.spec.sizes import predicted_bytes

SIZES: dict[str, Any] = {"vocabulary_size": 101, "num_layers": 1, "hidden_size": 64, "num_heads": 4}


class GatedReLU(torch.autograd.Function):
    """relu(gate) * up; saves its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.relu() * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        return torch.cat([gradient * up * (gate > 0), gradient * gate.relu()], dim=-1)


def absolute_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x over its mean magnitude, times the weight; and that factor, which the backward reads."""
    factor = 1 / (x.abs().mean(-1, keepdim=True) + epsilon)
    return x * factor * weight, factor


def absolute_norm_gradient(dy: Tensor, x: Tensor, factor: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    scaled = dy * weight
    mean = (scaled * x).mean(-1, keepdim=True)
    through = factor * (scaled - x.sign() * mean * factor)
    return through if dx is None else through + dx


def module(**functions: Any) -> ModuleType:
    found = ModuleType("reference")
    vars(found).update(functions)
    return found


def check_block(model: ModelConfig, op: str, reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted bytes of a block are declared ones, and its gradient is that of finite differences."""
    functions = tuple(name for name in vars(reference) if not name.startswith("_"))
    kernels = Registry([*OPS.ops, KernelOp(op, functions, (Backend(REFERENCE, reference),))])
    monkeypatch.setattr(counting, "build_layer", partial(build_layer, kernels=kernels))
    block = model_layers(model)[1]
    for parts in ([], ["mlp"], ["norms"], ["mlp", "norms"]):
        measured = counting.saved_bytes(model, block, 3, torch.float32, recompute=parts)  # type: ignore[arg-type]
        assert measured == predicted_bytes(model, block, 3, counting.SEQUENCE, "fp32", recompute=parts), parts
    layer = counting.bound_layer(model, block, torch.float64)
    for number, parameter in enumerate(layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    x = torch.randn(1, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7), requires_grad=True)
    context = counting.MicrobatchContext(ordinals=torch.arange(1))
    assert torch.autograd.gradcheck(lambda x: layer(x, context=context)[0], x, fast_mode=True)


def test_new_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "gated_relu", ActivationKind("gated_relu", gated=True))
    model = ModelConfig(**SIZES, activation="gated_relu")  # type: ignore[arg-type]
    check_block(model, "gated_relu", module(apply=GatedReLU.apply), monkeypatch)


def test_new_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        y, factor = absolute_norm(x + residual, weight, epsilon)
        return y, x + residual, factor

    def weight_gradient(dy: Tensor, x: Tensor, factor: Tensor, weight: Tensor) -> tuple[Tensor]:
        return ((dy * x * factor).flatten(0, -2).sum(0),)

    def backward(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return absolute_norm_gradient(dy, *rest), *weight_gradient(dy, *rest[:3])

    monkeypatch.setitem(NORMS, "absolute_norm", NormKind("absolute_norm", centred=False))
    reference = module(
        forward=absolute_norm,
        add_forward=add_forward,
        input_gradient=absolute_norm_gradient,
        weight_gradient=weight_gradient,
        backward=backward,
    )
    model = ModelConfig(**SIZES, normalization="absolute_norm")  # type: ignore[arg-type]
    check_block(model, "absolute_norm", reference, monkeypatch)
