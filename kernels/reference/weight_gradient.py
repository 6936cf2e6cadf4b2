"""A linear layer's weight gradient, added to an accumulator, in torch."""

from torch import Tensor


def accumulate(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """Add the weight gradient to total [out, in], for input x [..., in] and output gradient dy [..., out].

    The product is rounded to the dtype of x before it is added.
    """
    total.add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))
