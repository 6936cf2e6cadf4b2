"""Activations in Triton beside their references, with inputs."""

import torch
from torch import Tensor

from megapipe.kernels.reference import bias_gelu as bias_gelu_reference
from megapipe.kernels.reference import gelu as gelu_reference
from megapipe.kernels.reference import swiglu as swiglu_reference
from tests.kernels.apply_checks import Function
from tests.kernels.cases import draw

KINDS = ["none", "tanh", "bias none", "bias tanh", "swiglu"]
"""SwiGLU, or the form of GELU, with a bias or without."""


def case(
    kind: str, device: str, rows: tuple[int, ...], width: int, dtype: torch.dtype
) -> tuple[Function, Function, list[Tensor]]:
    """(kernel, reference, inputs) of an activation whose results are `width` wide."""
    from megapipe.kernels.triton_backend import bias_gelu, gelu, swiglu

    if kind == "swiglu":
        return swiglu.apply, swiglu_reference.apply, [draw(*rows, 2 * width, dtype=dtype, device=device)]
    x = draw(*rows, width, dtype=dtype, device=device)
    approximate = kind.removeprefix("bias ")
    if kind == approximate:
        return lambda x: gelu.apply(x, approximate), lambda x: gelu_reference.apply(x, approximate), [x]
    return (
        lambda x, bias: bias_gelu.apply(x, bias, approximate),
        lambda x, bias: bias_gelu_reference.apply(x, bias, approximate),
        [x, draw(width, seed=1, dtype=dtype, device=device)],
    )
