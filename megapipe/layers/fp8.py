"""Matrix products of linear layers in fp8 (Micikevicius et al. 2022, 2209.05433): operands are scaled and rounded to
8 bits right before each product, which is summed up in fp32.

Scales are current, from the operand itself: its largest magnitude lands on the format's largest number. tensorwise has
one for an operand, with E4M3 forward and E5M2, of the wider range, for gradients. rowwise has one for each row or
column that the product does not sum over, and E4M3 throughout.
"""

from typing import Literal

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.layers.linear import Products, as_matrix
from megapipe.parallel.collectives import largest_in_group
from megapipe.parallel.groups import Group

Recipe = Literal["tensorwise", "rowwise"]

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ALIGNMENT = 16
"""Every extent of a product on a GPU is a multiple of this."""


@opaque(
    "fp8_product(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    lambda a, b, scale_a, scale_b, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
)
def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] times the transpose of b [n, k], both fp8, each times its scales: [m, n] in `dtype`.

    scale_a, scale_b: fp32, a single one or [m, 1] and [n, 1]. Without fp8 units (CPU) the same product in fp32.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype)
    return (a.float() @ b.float().t()).mul_(scale_a).mul_(scale_b.t()).to(dtype)


def quantised(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in fp8, scale), the scale being that which brings `largest` to the format's largest number.

    largest: magnitudes that broadcast to x. Where one is not finite, neither is what comes of it. A normal number is
    off by at most 1/16 of itself in E4M3 and 1/8 in E5M2, a smaller one by scale * 2^-10 and scale * 2^-17.
    """
    limit = torch.finfo(dtype).max
    scale = (largest.float() / limit).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


class Fp8Products(Products):
    """The products of a linear layer in fp8; one instance for all layers of a rank.

    group: tensor ranks; they agree on tensorwise scales, as if each had the whole operand. Rowwise scales are of what
    a rank has: where the ranks share the axis that is summed over, these are finer than one process's.
    """

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.recipe = recipe
        self.group = group
        self.gradients = E5M2 if recipe == "tensorwise" else E4M3

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = as_matrix(weight)
        y = self._product(x.flatten(0, -2), matrix, E4M3).view(*x.shape[:-1], matrix.shape[0])
        return y if bias is None else y + bias.view(-1)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        matrix = as_matrix(weight)
        return self._product(dy.flatten(0, -2), matrix.t(), self.gradients).view(*dy.shape[:-1], matrix.shape[1])

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        return self._product(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), self.gradients)

    def _product(self, a: Tensor, b: Tensor, format_a: torch.dtype) -> Tensor:
        """a [m, k] times the transpose of b [n, k]; b is in E4M3."""
        largest_a, largest_b = self._largest(a, b)
        short_a, scale_a = quantised(a, largest_a, format_a)
        short_b, scale_b = quantised(b, largest_b, E4M3)
        return fp8_product(short_a, short_b, scale_a, scale_b, a.dtype)

    def _largest(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes of what shares a scale."""
        if self.recipe == "rowwise":
            return a.abs().amax(1, keepdim=True), b.abs().amax(1, keepdim=True)
        both = largest_in_group(torch.stack([a.abs().amax(), b.abs().amax()]).float(), self.group)
        return both[0].view(1, 1), both[1].view(1, 1)
