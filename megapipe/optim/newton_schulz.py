"""Matrices with singular values near 1, by Newton and Schulz's iteration (Jordan 2024, "Muon: an optimizer for hidden
layers in neural networks").
"""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients with the steepest slope at 0: five steps bring singular values from 0.01 to 0.7 .. 1.2, not to 1."""
SMALLEST_NORM = 1e-7


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """U V^T, about, of `matrix` [rows, columns] = U S V^T; bf16, in which all of it is computed."""
    x = matrix.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.t()
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.t() if tall else x
