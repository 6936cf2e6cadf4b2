"""Activations in torch: GELU, GELU of a sum with a bias, SiLU, ReLU and its square (So et al. 2021, 2109.08668), and
the gated SwiGLU and GEGLU (Shazeer 2020, 2002.05202). Every one saves its input alone for the backward."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional


def gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """x times the normal distribution function of x, element by element; `tanh` is GPT-2's approximation."""
    return functional.gelu(x, approximate=approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """GELU of x [..., f] plus bias [f]; `tanh` is GPT-2's approximation."""
    return functional.gelu(x + bias, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """x times the logistic function of x, element by element."""
    return functional.silu(x)


class _ReLU(torch.autograd.Function):
    """max(x, 0), or its square. Autograd's own formulas would keep results instead of the input, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, squared: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.squared = squared
        return x.relu().square_() if squared else x.relu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.squared:
            return 2 * gradient * x.relu(), None
        return torch.ops.aten.threshold_backward(gradient, x, 0), None


def relu(x: Tensor) -> Tensor:
    """max(x, 0), element by element."""
    return _ReLU.apply(x, False)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0) squared, element by element (Primer's activation, in Nemotron)."""
    return _ReLU.apply(x, True)


class _Gated(torch.autograd.Function):
    """Autograd's own formula would keep the activated gate as well. approximate: GELU's, or None for SiLU."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, approximate: str | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.approximate = approximate
        gate, up = gate_up.chunk(2, dim=-1)
        return _activated(gate, approximate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        if ctx.approximate is None:
            gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        else:
            gate_gradient = torch.ops.aten.gelu_backward(gradient * up, gate, approximate=ctx.approximate)
        return torch.cat([gate_gradient, gradient * _activated(gate, ctx.approximate)], dim=-1), None


def _activated(gate: Tensor, approximate: str | None) -> Tensor:
    return functional.silu(gate) if approximate is None else functional.gelu(gate, approximate=approximate)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]."""
    return _Gated.apply(gate_up, None)


def geglu(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """gelu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]; `tanh` is GPT-2's approximation."""
    return _Gated.apply(gate_up, approximate)
