"""Output projection with a bias and its cross entropy, over a vocabulary that the ranks of a group share.

For the few tokens of a sample that a masked language model predicts: their logits mostly fit in memory, so that
projection and loss can be two operations. Where they do not, `recomputed_loss_sum` makes them one. Ranks exchange
three numbers a row, as in layers/cross_entropy.py.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.layers.cross_entropy import Targets, VocabParallelHead, merged_loss
from megapipe.layers.split import SplitTape
from megapipe.parallel.collectives import copy_to_group, gather_from_group


class MaskedTokenHead(VocabParallelHead):
    """Projection of hidden states to the vocabulary, with a bias.

    shapes: of `weight` (stored rows, hidden) and `bias` (stored rows,); rows behind the true vocabulary are padding.
    """

    def local_logits(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """x [..., h] to this rank's logits [..., stored rows]."""
        return self.local_product(copy_to_group(x, self.group), tape, add_bias=True)

    def logits(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        return gather_from_group(self.local_logits(x, tape), self.group, dim=-1)[..., : self.vocabulary_size]

    def loss_sum(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, tape: SplitTape | None) -> Tensor:
        if self.recompute:
            return self.recomputed_loss_sum(x, labels, loss_mask, tape)
        return self.loss_of(self.local_logits(x, tape), labels, loss_mask)

    def loss_of(self, local: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Weighted sum of the cross entropies of `local_logits` [..., stored rows], a scalar in fp32 (fp64 for fp64).

        labels: int64 [...]. weights: [...], None for 1. Raises ValueError as `VocabParallelHead.loss_sum` does.
        """
        wide = torch.promote_types(local.dtype, torch.float32)
        row_weight = local.new_ones(labels.numel(), dtype=wide) if weights is None else weights.flatten().to(wide)
        targets = self._targets(labels.flatten(), row_weight)
        return _CrossEntropy.apply(local.flatten(0, -2), self, targets, row_weight)

    def correct(self, local: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted number of rows whose largest logit is the label's: float32, 0-dim, the same on every rank."""
        columns = local.detach().flatten(0, -2)[:, : self.num_columns].float()
        if self.num_columns:
            best, place = columns.max(dim=-1)
        else:  # a rank may hold padding alone
            best = columns.new_full((len(columns),), -torch.inf)
            place = torch.zeros_like(best, dtype=torch.int64)
        found = torch.stack([best.double(), (place + self.first_column).double()]).unsqueeze(0)
        by_rank = gather_from_group(found, self.group, dim=0)
        winner = by_rank[:, 0].argmax(dim=0, keepdim=True)
        predicted = by_rank[:, 1].gather(0, winner).squeeze(0)
        return ((predicted == labels.flatten()) * weights.flatten().float()).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, head: MaskedTokenHead, targets: Targets, row_weight: Tensor) -> Tensor:
        logits = local[:, : head.num_columns].contiguous()
        own = head.kernels.pick("cross_entropy", logits).statistics(logits, targets.columns, targets.owned)
        log_sum_exp, loss = merged_loss(own, head.group, targets, row_weight)
        ctx.save_for_backward(logits, log_sum_exp, row_weight)
        ctx.head, ctx.targets, ctx.stored = head, targets, local.shape[1]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum_exp, row_weight = ctx.saved_tensors
        gradient = logits.clone()
        op = ctx.head.kernels.pick("cross_entropy", gradient)
        op.gradient(gradient, ctx.targets.columns, ctx.targets.owned, log_sum_exp, dloss * row_weight)
        padding = ctx.stored - gradient.shape[1]
        return torch.nn.functional.pad(gradient, (0, padding)) if padding else gradient, None, None, None
