"""SwiGLU (Shazeer 2020, 2002.05202), in torch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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


def apply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 x ffn], gate first, to [..., ffn]."""
    return _SwiGLU.apply(gate_up)
