"""Activations in torch: GELU, GELU of a sum with a bias, SiLU, ReLU and its square (So et al. 2021, 2109.08668), and
the gated SwiGLU and GEGLU (Shazeer 2020, 2002.05202), and gpt-oss's SwiGLU (Agarwal et al. 2025, 2508.10925). Every
one saves its input alone for the backward."""

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


STEEPNESS, LIMIT = 1.702, 7.0
"""Of gpt-oss's SwiGLU: factor in its logistic function, and bound of its inputs."""


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _clamped(gate_up)
        return (gate * STEEPNESS).sigmoid_().mul_(gate).mul_(up + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = _clamped(gate_up)
        weight = (gate * STEEPNESS).sigmoid_()
        slope = weight * (1 + STEEPNESS * gate * (1 - weight))
        found = torch.cat([gradient * (up + 1) * slope, gradient * gate * weight], dim=-1)
        return found.masked_fill_(torch.cat([gate, up], dim=-1) != gate_up, 0.0)


def _clamped(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)


def swiglu_clamped(gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * logistic(1.702 gate), gate at most 7, up from -7 to 7: [..., 2 x ffn], gate first, to
    [..., ffn] (transformers' GptOssExperts)."""
    return _ClampedSwiGLU.apply(gate_up)


def geglu(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """gelu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]; `tanh` is GPT-2's approximation."""
    return _Gated.apply(gate_up, approximate)
