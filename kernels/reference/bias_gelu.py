"""GELU of a sum with a bias, in torch."""

from typing import Literal

from torch import Tensor
from torch.nn import functional


def apply(x: Tensor, bias: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """GELU of x [..., f] plus bias [f]; `tanh` is GPT-2's approximation."""
    return functional.gelu(x + bias, approximate=approximate)
