"""The two halves of a vocabulary-parallel cross entropy around its exchange between ranks, in torch.

A rank's part of a row is reduced to three numbers, its statistics: an offset, the sum of exp(logit - offset) over the
columns on this rank, and the target's logit or 0. `merged` combines the parts of all ranks to one softmax. Backends
differ in their offset, which may be any number near the largest logit.

The combination of output projection and cross entropy processes rows in chunks. There are two ways to compute
gradients. `linear_cross_entropy_statistics_and_gradient` saves the gradient of the logits in the compute dtype, and
nothing is computed twice: the split backward uses x and this gradient for its weight half.
`linear_cross_entropy_statistics` saves 12 bytes per row, and `linear_cross_entropy_backward` recomputes the logits of
each chunk, which takes a third more arithmetic, so that no tensor of rows times vocabulary ever exists. The second way
cannot be split: each half would recompute the logits. In these functions: x [n, h]. weight [stored, h], of which the
first num_columns rows are vocabulary and the rest padding. columns: int64 [n], each row's label as a row of weight, 0
if `owned` (bool [n]) is false. bias: [stored], added to the logits, or None. cap: the logits are cap x tanh(logits /
cap), in fp32 (fp64 for fp64), before anything else (Gemma 2, arXiv 2408.00118, section 2); None for no bound. The
gradient is that of the logits before the cap.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megapipe.kernels.reference.norms import wide_dtype
from megapipe.kernels.registry import Implementation, opaque


def cross_entropy_row_statistics(
    logits: Tensor, targets: Tensor, owned: Tensor, softmax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp [n] and target logit [n] over this rank's columns of logits [n, v], in fp32 (fp64 for fp64).

    targets: column of each row's label, int64 [n]; any valid column if `owned` (bool [n]) is false; the target logit
    is then 0, so that a sum over ranks is correct. softmax: if given, [n, v], receives exp(logits - log-sum-exp) in
    its own dtype. Without columns the log-sum-exp is minus infinity.
    """
    wide = wide_dtype(logits)
    if logits.shape[1] == 0:
        nothing = torch.zeros(logits.shape[0], dtype=wide, device=logits.device)
        return nothing - torch.inf, nothing
    log_softmax = torch.log_softmax(logits, dim=-1, dtype=wide)
    columns = targets.unsqueeze(1)
    target = logits.gather(1, columns).squeeze(1).to(wide)
    log_sum_exp = target - log_softmax.gather(1, columns).squeeze(1)
    hidden = target == -torch.inf  # the difference is then NaN, and another column is needed
    # Two more reads of the row, which are left out if none is hidden; on a GPU, the check would stall the device.
    if torch.compiler.is_compiling() or logits.device.type != "cpu" or hidden.any():
        largest = logits.amax(-1).to(wide)
        without_target = torch.where(largest == -torch.inf, largest, largest - log_softmax.amax(-1))
        log_sum_exp = torch.where(hidden, without_target, log_sum_exp)
    if softmax is not None and torch.compiler.is_compiling():
        softmax.copy_(log_softmax.exp())  # torch.compile cannot trace `out` in a padded tensor
    elif softmax is not None:
        torch.exp(log_softmax, out=softmax)
    return log_sum_exp, torch.where(owned, target, 0.0)


def cross_entropy_logit_gradient(
    softmax: Tensor, targets: Tensor, owned: Tensor, share: Tensor | None, at_target: Tensor | None = None
) -> None:
    """Turn this rank's softmax [n, v] in place into the gradient of each row's loss.

    share: [n], this rank's fraction of the sum of exponentials over all ranks; None for 1. at_target: [n], factor of
    the softmax in the target's column; None for 1.
    """
    if share is not None:
        softmax.mul_(share.unsqueeze(1))
        # All columns of this rank may be minus infinity; their softmax is NaN.
        absent = share == 0
        if torch.compiler.is_compiling() or softmax.device.type != "cpu" or absent.any():
            softmax.masked_fill_(absent.unsqueeze(1), 0.0)
    if softmax.shape[1]:
        # scatter_add_ copies the whole of a bf16 tensor on the CPU, which took longer than the softmax.
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        softmax[rows, targets] -= (owned if at_target is None else owned * at_target).to(softmax.dtype)


def cross_entropy_statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """Return [3, n] (offset, sum of exponentials, target logit) of logits [n, v], in fp32 (fp64 for fp64).

    columns: int64 [n], each row's label. owned: bool [n], whether that column is on this rank.
    """
    return with_sums(*cross_entropy_row_statistics(logits, columns, owned, None))


def with_sums(log_sum_exp: Tensor, target: Tensor) -> Tensor:
    """Return statistics [3, n] whose offset is the log-sum-exp, so that the sum of exponentials is 1."""
    return torch.stack([log_sum_exp, torch.ones_like(log_sum_exp), target])


def merged(by_rank: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp [n] and target logit [n] over the columns of all ranks, from their statistics [ranks, 3,
    n]."""
    offset, total, target = by_rank.unbind(1)
    largest = offset.amax(0)
    # A rank may have no column, or none above minus infinity.
    largest = torch.where(largest.isinf(), 0.0, largest)
    return largest + (total * torch.exp(offset - largest)).sum(0).log(), target.sum(0)


def cross_entropy_statistics_and_gradient(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """Return the `statistics` of a rank that has the whole vocabulary, and turn the logits into the gradient of each
    row's loss."""
    softmax = torch.empty_like(logits)
    result = with_sums(*cross_entropy_row_statistics(logits, columns, owned, softmax))
    cross_entropy_logit_gradient(softmax, columns, owned, None)
    logits.copy_(softmax)
    return result


def cross_entropy_gradient(
    logits: Tensor, columns: Tensor, owned: Tensor, log_sum_exp: Tensor, scale: Tensor | None
) -> None:
    """Turn logits [n, v] in place into the gradient of each row's loss, times the row's scale ([n]) if given.

    log_sum_exp: [n], over the columns of all ranks. It is in fp32 (fp64 for fp64), and so is all arithmetic.
    """
    wide = torch.exp(logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(1))
    cross_entropy_logit_gradient(wide, columns, owned, None)
    logits.copy_(wide if scale is None else wide.mul_(scale.unsqueeze(1)))


CHUNK_ROWS = 256
"""Rows per chunk: at 8192 columns a chunk is 8 MB in fp32. On a CPU core 128 and 256 are fastest at hidden size 256
(measured); 32 and 1024 take 2% to 13% longer."""


def linear_cross_entropy_statistics(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    bias: Tensor | None = None,
    cap: float | None = None,
    softmax: Tensor | None = None,
) -> Tensor:
    """Return the statistics [3, n] of the logits, which the docstring of this module describes.

    softmax: if present, [n, stored], receives this rank's softmax of the logits, times the derivative of the cap.
    """
    pieces = [x.new_empty(2, 0, dtype=wide_dtype(x))]
    for first in range(0, x.shape[0], CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        logits = projected(x[chunk], weight, bias)[:, :num_columns]
        result = None if softmax is None else softmax[chunk, :num_columns]
        if cap is not None:
            logits, slope = softcapped(logits, cap)
            exact = None if result is None else torch.empty_like(logits)
            pieces.append(torch.stack(cross_entropy_row_statistics(logits, columns[chunk], owned[chunk], exact)))
            if result is not None and exact is not None:
                result.copy_(exact.mul_(slope))
            continue
        pieces.append(torch.stack(cross_entropy_row_statistics(logits, columns[chunk], owned[chunk], result)))
    return with_sums(*torch.cat(pieces, dim=1))


# Opaque, like the functions below: a graph would unroll all chunks that are written in place.
@opaque(
    "linear_cross_entropy_gradient(Tensor x, Tensor weight, Tensor columns, Tensor owned, "
    "SymInt num_columns, bool alone, float? cap=None) -> (Tensor, Tensor)",
    lambda x, weight, *_, cap=None: (
        x.new_empty(3, x.shape[0], dtype=wide_dtype(x)),
        x.new_empty(x.shape[0], weight.shape[0]),
    ),
)
def linear_cross_entropy_statistics_and_gradient(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    alone: bool,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return statistics [3, n], and the gradient of each row's loss by its logits [n, stored] in x's dtype, 0 in the
    padding.

    alone: whether this rank has the whole vocabulary. If not, call `complete_gradient` after the exchange.
    """
    gradient = x.new_empty(x.shape[0], weight.shape[0])
    gradient[:, num_columns:].zero_()
    statistics = linear_cross_entropy_statistics(x, weight, columns, owned, num_columns, None, cap, gradient)
    if alone:
        cross_entropy_logit_gradient(gradient[:, :num_columns], columns, owned, None, slope_at(statistics[2], cap))
    return statistics, gradient


@opaque(
    "linear_cross_entropy_complete(Tensor(a!) gradient, Tensor columns, Tensor owned, "
    "SymInt num_columns, Tensor own, Tensor log_sum_exp, float? cap=None) -> ()",
    lambda gradient, columns, owned, num_columns, own, log_sum_exp, cap=None: None,
)
def linear_cross_entropy_complete_gradient(
    gradient: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    own: Tensor,
    log_sum_exp: Tensor,
    cap: float | None = None,
) -> None:
    """Complete, in place, the gradient of `statistics_and_gradient` on a rank that has a part of the vocabulary.

    own: this rank's statistics. log_sum_exp: [n], merged from all ranks' statistics.
    """
    share = own[1] * torch.exp(own[0] - log_sum_exp)
    cross_entropy_logit_gradient(gradient[:, :num_columns], columns, owned, share, slope_at(own[2], cap))


def backward_by(
    gradient: Callable[..., None],
    step: int,
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    owned: Tensor,
    num_columns: int,
    log_sum_exp: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> list[Tensor]:
    """Return the gradients of the losses' weighted sum: for x [n, h] in its dtype, and in the dtype of log_sum_exp for
    weight [stored, h] and, if there is one, for bias [stored].

    gradient: the `cross_entropy_gradient` of a backend. step: number of rows at a time, whose logits are recomputed.
    scale: [n] in log_sum_exp's dtype, each row's weight.
    """
    parameters = [weight] if bias is None else [weight, bias]
    dx, sums = torch.empty_like(x), [each.new_zeros(each.shape, dtype=log_sum_exp.dtype) for each in parameters]
    used, added = weight[:num_columns], None if bias is None else bias[:num_columns]
    for first in range(0, x.shape[0], step):
        chunk = slice(first, first + step)
        logits = projected(x[chunk], used, added)
        slope = None
        if cap is not None:
            logits, slope = softcapped(logits, cap)
        gradient(logits, columns[chunk], owned[chunk], log_sum_exp[chunk], scale[chunk])
        if slope is not None:
            logits = logits.mul_(slope).to(x.dtype)
        dx[chunk] = logits @ used
        sums[0][:num_columns] += logits.t() @ x[chunk]
        if bias is not None:
            sums[1][:num_columns] += logits.sum(0, dtype=log_sum_exp.dtype)
    return [dx, *sums]


linear_cross_entropy_backward = partial(backward_by, cross_entropy_gradient, CHUNK_ROWS)
"""The op's backward."""


def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits [n, v] for x [n, h], weight [v, h], and bias [v]."""
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def softcapped(logits: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return cap x tanh(logits / cap), and its derivative, in fp32 (fp64 for fp64)."""
    wide = torch.tanh(logits.to(wide_dtype(logits)) / cap)
    return wide * cap, 1 - wide.square()


def slope_at(target: Tensor, cap: float | None) -> Tensor | None:
    """Return the derivative of the cap where its result is the target's logit."""
    return None if cap is None else 1 - (target / cap).square()


softcapped_linear_cross_entropy = Implementation(
    statistics=linear_cross_entropy_statistics,
    statistics_and_gradient=linear_cross_entropy_statistics_and_gradient,
    complete_gradient=linear_cross_entropy_complete_gradient,
    backward=linear_cross_entropy_backward,
)
"""A separate op, always called with `cap`, because other backends of `linear_cross_entropy` do not support it."""
