"""Activations in torch: GELU, GELU of a sum with a bias, SiLU, ReLU and its square (So et al. 2021, 2109.08668), and
the gated SwiGLU, GEGLU and ReGLU (Shazeer 2020, 2002.05202), ReGLU with the square of ReLU (Ma et al. 2025,
2504.12285), and gpt-oss's SwiGLU (Agarwal et al. 2025, 2508.10925). Each saves only its input for the backward."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional


def gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Return x times the normal distribution function of x, element by element; `tanh` is GPT-2's approximation."""
    return functional.gelu(x, approximate=approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Return the GELU of x [..., f] plus bias [f]; `tanh` is GPT-2's approximation."""
    return functional.gelu(x + bias, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """Return x times the logistic function of x, element by element."""
    return functional.silu(x)


class _ReLU(torch.autograd.Function):
    """max(x, 0), or its square. Autograd's own formulas would save the result instead of the input, or both."""

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
    """Return max(x, 0), element by element."""
    return _ReLU.apply(x, False)


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0) squared, element by element (Primer's activation, in Nemotron)."""
    return _ReLU.apply(x, True)


class _Gated(torch.autograd.Function):
    """Gated activations. Autograd's own formula would also save the activated gate. kind: as for `_activated`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kind = kind
        gate, up = gate_up.chunk(2, dim=-1)
        return _activated(gate, kind) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        inner = gradient * up
        if ctx.kind == "silu":
            gate_gradient = torch.ops.aten.silu_backward(inner, gate)
        elif ctx.kind == "relu":
            gate_gradient = torch.ops.aten.threshold_backward(inner, gate, 0)
        elif ctx.kind == "squared":
            gate_gradient = 2 * inner * gate.relu()
        else:
            gate_gradient = torch.ops.aten.gelu_backward(inner, gate, approximate=ctx.kind)
        return torch.cat([gate_gradient, gradient * _activated(gate, ctx.kind)], dim=-1), None


def _activated(gate: Tensor, kind: str) -> Tensor:
    """Return SiLU, ReLU, its square, or GELU with the approximation `kind`."""
    if kind == "silu":
        return functional.silu(gate)
    if kind in ("relu", "squared"):
        return gate.relu().square_() if kind == "squared" else gate.relu()
    return functional.gelu(gate, approximate=kind)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]."""
    return _Gated.apply(gate_up, "silu")


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = _clamped(gate_up, limit)
        return (gate * alpha).sigmoid_().mul_(gate).mul_(up + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = _clamped(gate_up, ctx.limit)
        weight = (gate * ctx.alpha).sigmoid_()
        slope = weight * (1 + ctx.alpha * gate * (1 - weight))
        gradients = torch.cat([gradient * (up + 1) * slope, gradient * gate * weight], dim=-1)
        clamped = torch.cat([gate, up], dim=-1) != gate_up
        return gradients.masked_fill_(clamped, 0.0), None, None


def _clamped(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def swiglu_clamped(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * logistic(alpha * gate), with gate at most `limit`, up from -limit to limit: [..., 2 x
    ffn], gate first, to [..., ffn] (transformers' GptOssExperts)."""
    return _ClampedSwiGLU.apply(gate_up, alpha, limit)


def geglu(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Return gelu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]; `tanh` is GPT-2's approximation."""
    return _Gated.apply(gate_up, approximate)


def reglu(gate_up: Tensor, kind: Literal["relu", "squared"]) -> Tensor:
    """Return max(gate, 0) * up, or its square times up: [..., 2 x ffn], gate first, to [..., ffn]."""
    return _Gated.apply(gate_up, kind)
