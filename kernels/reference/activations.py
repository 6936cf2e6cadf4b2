"""Activations in torch: GELU, GELU of a sum with a bias, and SwiGLU (Shazeer 2020, 2002.05202)."""

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


class _SwiGLU(torch.autograd.Function):
    """Saves its input alone: autograd's own formula would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        return torch.cat([gate_gradient, gradient * functional.silu(gate)], dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]."""
    return _SwiGLU.apply(gate_up)
