"""Output projection and cross entropy in one: the functions of `megapipe.kernels.reference.linear_cross_entropy`.

The products are torch's, which no kernel of ours would better; between them the logits are read and written in place
by the kernels of `cross_entropy`. What is kept has one copy: the product is written where the gradient will lie.
"""

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.linear_cross_entropy import projected
from megapipe.kernels.triton_backend import cross_entropy
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.spec.temporaries import chunk_rows


def _fake_statistics(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, bias: Tensor | None = None
) -> Tensor:
    return x.new_empty(3, x.shape[0], dtype=torch.float32)


@opaque(
    "linear_cross_entropy_statistics_triton(Tensor x, Tensor weight, Tensor columns, Tensor owned, "
    "SymInt num_columns, Tensor? bias=None) -> Tensor",
    _fake_statistics,
)
def statistics(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, bias: Tensor | None = None
) -> Tensor:
    """Statistics of the logits [3, n], as `megapipe.kernels.reference.cross_entropy` describes them."""
    result = _fake_statistics(x, weight, columns, owned, num_columns)
    used, added = weight[:num_columns], None if bias is None else bias[:num_columns]
    step = chunk_rows(num_columns, x.dtype.itemsize)
    for first in range(0, x.shape[0], step):
        chunk = slice(first, first + step)
        result[:, chunk] = cross_entropy.statistics(projected(x[chunk], used, added), columns[chunk], owned[chunk])
    return result


def _fake_statistics_and_gradient(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, alone: bool
) -> tuple[Tensor, Tensor]:
    return _fake_statistics(x, weight, columns, owned, num_columns), x.new_empty(x.shape[0], weight.shape[0])


@opaque(
    "linear_cross_entropy_gradient_triton(Tensor x, Tensor weight, Tensor columns, Tensor owned, "
    "SymInt num_columns, bool alone) -> (Tensor, Tensor)",
    _fake_statistics_and_gradient,
)
def statistics_and_gradient(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, alone: bool
) -> tuple[Tensor, Tensor]:
    """(statistics [3, n], gradient of each row's loss by its logits [n, stored] in x's dtype, 0 in the padding).

    alone: whether this rank has the whole vocabulary. If not, `complete_gradient` has to follow the exchange.
    """
    gradient = x.new_empty(x.shape[0], weight.shape[0])
    gradient[:, num_columns:].zero_()
    logits = gradient[:, :num_columns]
    torch.mm(x, weight[:num_columns].t(), out=logits)
    pass_over = cross_entropy.statistics_and_gradient if alone else cross_entropy.statistics
    return pass_over(logits, columns, owned), gradient


@opaque(
    "linear_cross_entropy_complete_triton(Tensor(a!) gradient, Tensor columns, Tensor owned, SymInt num_columns, "
    "Tensor own, Tensor log_sum_exp) -> ()",
    lambda gradient, columns, owned, num_columns, own, log_sum_exp: None,
)
def complete_gradient(
    gradient: Tensor, columns: Tensor, owned: Tensor, num_columns: int, own: Tensor, log_sum_exp: Tensor
) -> None:
    """Make, in place, what `statistics_and_gradient` left of a rank among others the gradient that it promises.

    own: this rank's statistics, which are not needed here: it left the logits. log_sum_exp: fp32 [n].
    """
    cross_entropy.gradient(gradient[:, :num_columns], columns, owned, log_sum_exp, None)


def _fake_backward(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    log_sum_exp: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
) -> list[Tensor]:
    parameters = [weight] if bias is None else [weight, bias]
    return [x.new_empty(x.shape), *(each.new_empty(each.shape, dtype=torch.float32) for each in parameters)]


@opaque(
    "linear_cross_entropy_backward_triton(Tensor x, Tensor weight, Tensor columns, Tensor owned, SymInt num_columns, "
    "Tensor log_sum_exp, Tensor scale, Tensor? bias=None) -> Tensor[]",
    _fake_backward,
)
def backward(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    log_sum_exp: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of the losses' weighted sum: of x [n, h] in its dtype; in fp32 of weight [stored, h] and, if there is
    one, of bias [stored].

    scale: fp32 [n], each row's weight. Computes the logits once more.
    """
    gradients = _fake_backward(x, weight, columns, owned, num_columns, log_sum_exp, scale, bias)
    dx, *of_parameters = gradients
    for gradient in of_parameters:
        gradient.zero_()
    used, added = weight[:num_columns], None if bias is None else bias[:num_columns]
    step = chunk_rows(num_columns, x.dtype.itemsize)
    for first in range(0, x.shape[0], step):
        chunk = slice(first, first + step)
        logits = projected(x[chunk], used, added)
        cross_entropy.gradient(logits, columns[chunk], owned[chunk], log_sum_exp[chunk], scale[chunk])
        torch.mm(logits, used, out=dx[chunk])
        of_parameters[0][:num_columns] += logits.t() @ x[chunk]
        if bias is not None:
            of_parameters[1][:num_columns] += logits.sum(0, dtype=torch.float32)
    return gradients
