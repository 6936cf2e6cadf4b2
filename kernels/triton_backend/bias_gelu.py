"""GELU of a sum with a bias, in Triton: the function of `megapipe.kernels.reference.bias_gelu`."""

from typing import Literal

from torch import Tensor

from megapipe.kernels.triton_backend.gelu import with_bias
from megapipe.kernels.triton_backend.launch import refusal as refusal


def apply(x: Tensor, bias: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """GELU of x [..., f] plus bias [f], in x's dtype, rounded once."""
    return with_bias(x, bias, approximate)
