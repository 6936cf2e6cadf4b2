"""The two halves of a vocabulary-parallel cross entropy around its exchange between ranks, in torch.

A rank's part of a row comes to three numbers, its statistics: an offset, the sum of exp(logit - offset) over the
columns here, and the target's logit or 0. `merged` makes one softmax of all ranks' parts. Backends differ in their
offset, which may be any number near the largest logit.
"""

import torch
from torch import Tensor


def row_statistics(logits: Tensor, targets: Tensor, owned: Tensor, softmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-sum-exp [n], target logit [n]) over this rank's columns of logits [n, v], in fp32 (fp64 for fp64).

    targets: column of each row's label, int64 [n]; any valid column where `owned` (bool [n]) is false, and then the
    target logit is 0, so that a sum over ranks gives the right one. softmax: if given, [n, v], receives
    exp(logits - log-sum-exp) in its own dtype. Without columns the log-sum-exp is minus infinity.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if logits.shape[1] == 0:
        nothing = torch.zeros(logits.shape[0], dtype=wide, device=logits.device)
        return nothing - torch.inf, nothing
    log_softmax = torch.log_softmax(logits, dim=-1, dtype=wide)
    columns = targets.unsqueeze(1)
    target = logits.gather(1, columns).squeeze(1).to(wide)
    log_sum_exp = target - log_softmax.gather(1, columns).squeeze(1)
    if softmax is not None and torch.compiler.is_compiling():
        softmax.copy_(log_softmax.exp())  # `out` behind padding is more than torch.compile can trace
    elif softmax is not None:
        torch.exp(log_softmax, out=softmax)
    return log_sum_exp, torch.where(owned, target, 0.0)


def logit_gradient(softmax: Tensor, targets: Tensor, owned: Tensor, share: Tensor | None) -> None:
    """Turn this rank's softmax [n, v] in place into the gradient of each row's loss.

    share: [n], the part that this rank's exponentials are of the sum over all ranks; None for all of it.
    """
    if share is not None:
        softmax.mul_(share.unsqueeze(1))
    if softmax.shape[1]:
        # scatter_add_ copies the whole of a bf16 tensor on the CPU, which took longer than the softmax.
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        softmax[rows, targets] -= owned.to(softmax.dtype)


def statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[3, n] (offset, sum of exponentials, target logit) of logits [n, v], in fp32 (fp64 for fp64).

    columns: int64 [n], each row's label. owned: bool [n], whether that is a column here.
    """
    return with_sums(*row_statistics(logits, columns, owned, None))


def with_sums(log_sum_exp: Tensor, target: Tensor) -> Tensor:
    """Statistics [3, n] whose offset is the log-sum-exp, so that the sum of exponentials is 1."""
    return torch.stack([log_sum_exp, torch.ones_like(log_sum_exp), target])


def merged(by_rank: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp [n], target logit [n]) over the columns of all ranks, from their statistics [ranks, 3, n]."""
    offset, total, target = by_rank.unbind(1)
    largest = offset.amax(0)
    # A rank may have no column, or none above minus infinity.
    largest = torch.where(largest.isinf(), 0.0, largest)
    return largest + (total * torch.exp(offset - largest)).sum(0).log(), target.sum(0)


def statistics_and_gradient(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """`statistics` of a rank that has the whole vocabulary; the logits become the gradient of each row's loss."""
    softmax = torch.empty_like(logits)
    result = with_sums(*row_statistics(logits, columns, owned, softmax))
    logit_gradient(softmax, columns, owned, None)
    logits.copy_(softmax)
    return result


def gradient(logits: Tensor, columns: Tensor, owned: Tensor, log_sum_exp: Tensor, scale: Tensor | None) -> None:
    """Turn logits [n, v] in place into the gradient of each row's loss, times the row's scale ([n]) if given.

    log_sum_exp: [n], over the columns of all ranks. It is in fp32 (fp64 for fp64), and so is all arithmetic.
    """
    wide = torch.exp(logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(1))
    logit_gradient(wide, columns, owned, None)
    logits.copy_(wide if scale is None else wide.mul_(scale.unsqueeze(1)))
