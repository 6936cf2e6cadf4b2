"""The two halves of a vocabulary-parallel cross entropy around its exchange between ranks, in torch."""

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
