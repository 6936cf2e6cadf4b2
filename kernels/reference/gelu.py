"""GELU (Hendrycks and Gimpel 2016, 1606.08415), in torch."""

from typing import Literal

from torch import Tensor
from torch.nn import functional


def apply(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """x times the normal distribution function of x, element by element; `tanh` is GPT-2's approximation."""
    return functional.gelu(x, approximate=approximate)
