"""Output projection and cross entropy in one, chunk by chunk of rows, in torch.

Two ways lead to the gradients. `statistics_and_gradient` keeps the gradient of the logits in the compute dtype, and
nothing is computed twice: the split backward takes x and this gradient for its weight half. `statistics` keeps 12
bytes a row, and `backward` computes the logits of each chunk again, a third more arithmetic, so that no tensor of rows
times vocabulary ever exists. That way cannot be split: halves apart from each other would each compute the logits.

In all functions: x [n, h]. weight [stored, h], of which the first num_columns rows are vocabulary and the rest
padding. columns: int64 [n], each row's label as a row of weight, 0 where `owned` (bool [n]) is false. bias: [stored],
added to the logits, or None.
"""

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference import cross_entropy

CHUNK_ROWS = 256
"""Rows per chunk: at 8192 columns a chunk is 8 MB in fp32. On a CPU core 128 and 256 are fastest at hidden size 256
(measured); 32 and 1024 take 2% to 13% longer."""


def statistics(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, bias: Tensor | None = None
) -> Tensor:
    """Statistics of the logits [3, n], as `megapipe.kernels.reference.cross_entropy` describes them."""
    return _statistics(x, weight, columns, owned, num_columns, None, bias)


def _fake_statistics_and_gradient(
    x: Tensor, weight: Tensor, columns: Tensor, owned: Tensor, num_columns: int, alone: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(3, x.shape[0], dtype=wide), x.new_empty(x.shape[0], weight.shape[0])


# Opaque, as is what follows: chunks written in place would be unrolled into a graph, as many as there are.
@opaque(
    "linear_cross_entropy_gradient(Tensor x, Tensor weight, Tensor columns, Tensor owned, SymInt num_columns, "
    "bool alone) -> (Tensor, Tensor)",
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
    found = _statistics(x, weight, columns, owned, num_columns, gradient)
    if alone:
        cross_entropy.logit_gradient(gradient[:, :num_columns], columns, owned, None)
    return found, gradient


@opaque(
    "linear_cross_entropy_complete(Tensor(a!) gradient, Tensor columns, Tensor owned, SymInt num_columns, Tensor own, "
    "Tensor log_sum_exp) -> ()",
    lambda gradient, columns, owned, num_columns, own, log_sum_exp: None,
)
def complete_gradient(
    gradient: Tensor, columns: Tensor, owned: Tensor, num_columns: int, own: Tensor, log_sum_exp: Tensor
) -> None:
    """Make, in place, what `statistics_and_gradient` left of a rank among others the gradient that it promises.

    own: this rank's statistics. log_sum_exp: [n], merged from all ranks' statistics.
    """
    share = own[1] * torch.exp(own[0] - log_sum_exp)
    cross_entropy.logit_gradient(gradient[:, :num_columns], columns, owned, share)


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
    """Gradients of the losses' weighted sum: of x [n, h] in its dtype, of weight [stored, h] in log_sum_exp's and, if
    there is a bias, of it [stored] likewise.

    scale: [n] in log_sum_exp's dtype, each row's weight. Computes the logits once more.
    """
    dx = torch.empty_like(x)
    dweight = torch.zeros(weight.shape, dtype=log_sum_exp.dtype, device=weight.device)
    dbias = None if bias is None else dweight.new_zeros(bias.shape)
    used = weight[:num_columns]
    for first in range(0, x.shape[0], CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        logits = projected(x[chunk], used, None if bias is None else bias[:num_columns])
        cross_entropy.gradient(logits, columns[chunk], owned[chunk], log_sum_exp[chunk], scale[chunk])
        dx[chunk] = logits @ used
        dweight[:num_columns] += logits.t() @ x[chunk]
        if dbias is not None:
            dbias[:num_columns] += logits.sum(0, dtype=dbias.dtype)
    return [dx, dweight] if dbias is None else [dx, dweight, dbias]


def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [n, v] of x [n, h] by weight [v, h], and bias [v]."""
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def _statistics(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    softmax: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax: if given, [n, stored], receives this rank's softmax of the logits."""
    pieces = [x.new_empty(2, 0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)]
    for first in range(0, x.shape[0], CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        logits = projected(x[chunk], weight, bias)[:, :num_columns]
        result = None if softmax is None else softmax[chunk, :num_columns]
        pieces.append(torch.stack(cross_entropy.row_statistics(logits, columns[chunk], owned[chunk], result)))
    return cross_entropy.with_sums(*torch.cat(pieces, dim=1))
