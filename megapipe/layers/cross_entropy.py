"""Output projection and cross entropy, over a vocabulary that is sharded over the ranks of a group.

`VocabParallelHead` combines both. The backends of its op process rows in chunks or overwrite the logits, so that fp32
logits of a whole micro-batch never exist. The gradient of the logits is saved for the backward, in the compute dtype;
if logits are recomputed, only four bytes per row are saved, and the logits of a whole micro-batch never exist in any
dtype. Ranks exchange three numbers per row, once: 12 bytes from which each rank computes the softmax over all columns.

`MaskedTokenHead` has a bias, and processes the few tokens of a sample that a masked language model predicts: their
logits usually fit in memory, so that projection and loss can be two operations. If they do not, `recomputed_loss_sum`
combines them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.reference.cross_entropy import cross_entropy_logit_gradient, merged, slope_at, softcapped
from megapipe.kernels.reference.norms import wide_dtype
from megapipe.kernels.registry import Implementation, Registry
from megapipe.layers.linear import Linear, OnShards, Shapes, weight_gradient
from megapipe.layers.split import SplitError, SplitTape, Tensors, WeightGradients
from megapipe.parallel.collectives import gather_from_group, gather_tokens
from megapipe.parallel.groups import Group


@dataclass(frozen=True)
class Targets:
    """Labels from the view of one rank, one entry per row.

    columns: int64 [n], the label's column on this rank, 0 if `owned` (bool [n]) is false. known: bool [n], whether the
    label is in the vocabulary, or its row has no weight.
    """

    columns: Tensor
    owned: Tensor
    known: Tensor


class VocabParallelHead(Linear, OnShards):
    """Projection to the vocabulary, of which each rank has an equal part, followed by the loss.

    shapes: of `weight` (stored rows, hidden). vocabulary_size: true number of tokens; rows after it are padding,
    which neither enters a softmax nor gets a gradient. recompute: recompute the logits in the backward, chunk by
    chunk, instead of saving their gradient; such a loss cannot be split. softcap: bound of the logits, by tanh.
    """

    def __init__(
        self,
        shapes: Shapes,
        vocabulary_size: int,
        group: Group,
        kernels: Registry,
        recompute: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__(shapes, group)
        self.vocabulary_size = vocabulary_size
        self.kernels = kernels
        self.recompute = recompute
        self.softcap = softcap
        self.capped = {} if softcap is None else {"cap": softcap}
        stored = shapes["weight"][0]
        self.first_column = group.rank * stored
        self.num_columns = max(0, min(stored, vocabulary_size - self.first_column))

    def logits(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """Return the logits [b, s, v] of x [b, s, h] over the true vocabulary, on every rank."""
        local = self.local_logits(x, tape)
        if self.softcap is not None:
            local = softcapped(local, self.softcap)[0].to(local.dtype)
        return gather_from_group(local, self.group, dim=-1)[..., : self.vocabulary_size]

    def local_logits(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """Return this rank's logits [..., stored rows] for x [..., h], before they are capped."""
        return self.local_product(self.on_all_tokens(x, self.group), tape, add_bias=True)

    def loss_sum(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, tape: SplitTape | None) -> Tensor:
        """Return the weighted sum of the cross entropy over tokens, a scalar in fp32 (fp64 for fp64), the same on
        every rank.

        x: [b, s, h]. labels: int64 [b, s]. loss_mask: [b, s] weights, None for 1.
        Raises ValueError for a label outside of the vocabulary that has weight; on a GPU, where the check would stall
        the device, the loss becomes NaN instead. Raises SplitError if there is a tape and logits are recomputed.
        """
        if self.recompute:
            return self.recomputed_loss_sum(x, labels, loss_mask, tape)
        rows = self.on_all_tokens(x, self.group).flatten(0, -2)
        row_weight = row_weights(loss_mask, x)
        targets = self._targets(labels.flatten(), row_weight)
        if tape is None:
            # Autograd is always disabled within the function.
            keep = torch.is_grad_enabled()
            return _FusedCrossEntropy.apply(rows, self.weight, self, targets, row_weight, keep, self._kept(x, rows))
        record = tape.record(self, (), rows.new_empty((), dtype=wide_dtype(rows)))
        loss, gradient = _ProbedCrossEntropy.apply(rows, record.probe, self.weight.detach(), self, targets, row_weight)
        kept = self._kept(x, rows)
        record.saved = (kept, gradient) if row_weight is None else (kept, gradient, row_weight)
        return loss

    def recomputed_loss_sum(
        self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, tape: SplitTape | None
    ) -> Tensor:
        """Return `loss_sum`, with the bias if there is one. Neither forward nor backward has a tensor of size rows x
        vocabulary."""
        if tape is not None:
            raise SplitError(
                "halves of a split backward would each recompute the logits; "
                "set recompute.logits false, or use a schedule with whole backwards"
            )
        rows = self.on_all_tokens(x, self.group).flatten(0, -2)
        row_weight = row_weights(loss_mask, x)
        kept = self._kept(x, rows)
        return _Recomputed.apply(rows, self.weight, self.bias, self, labels.flatten(), row_weight, kept)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        if len(saved) == 1:  # the logits were the output, not a loss
            return super().weight_half(saved, gradient)
        row_weight = saved[2] if len(saved) == 3 else None
        return [(self.weight, loss_weight_gradient(self.rows_of(saved[0]), saved[1], row_weight, gradient))]

    def loss_op(self, rows: Tensor) -> Implementation:
        """Return the op's functions for such rows; they also take the arguments of `capped`."""
        capped = "softcapped_" if self.capped else ""
        return self.kernels.pick(f"{capped}linear_cross_entropy", rows)

    def _kept(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the tensor from which a backward gets the rows [n, h]: this rank's tokens x [b, s / t, h], or the
        rows."""
        return rows.detach() if self.sequence is None else x.detach()

    def rows_of(self, kept: Tensor) -> Tensor:
        """Return the rows [n, h] from the tensor that `_kept` returned."""
        return kept if self.sequence is None else gather_tokens(kept, self.group).flatten(0, -2)

    def _targets(self, labels: Tensor, row_weight: Tensor | None) -> Targets:
        known = (labels >= 0) & (labels < self.vocabulary_size)
        if row_weight is not None:
            known = known | (row_weight == 0)
        if labels.device.type == "cpu" and not torch.compiler.is_compiling() and not known.all():
            wrong = labels[~known][0].item()
            raise ValueError(
                f"label {wrong} is outside of the vocabulary of {self.vocabulary_size} tokens; "
                "raise model.vocabulary_size, or give the token no weight in the loss mask"
            )
        return Targets(*self.columns_of(labels), known)

    def columns_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return columns and owned of `Targets` for labels [n]."""
        columns = labels - self.first_column
        owned = (columns >= 0) & (columns < self.num_columns)
        return columns.masked_fill(~owned, 0), owned


class SharedHead(VocabParallelHead):
    """A shard of an output matrix that is sharded over all pipeline ranks; its statistics are exchanged between
    forward and backward: algorithm 1 of "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv
    2411.05288, for whole backwards, and algorithm 2 for split ones.

    If gradients are computed, the loss is 0 until the backward, or its input half, has run.
    """

    def loss_sum(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, tape: SplitTape | None) -> Tensor:
        rows = x.flatten(0, -2)
        row_weight = row_weights(loss_mask, x)
        targets = self._targets(labels.flatten(), row_weight)
        if not torch.is_grad_enabled():
            return loss_and_logit_gradient(rows, self.weight, self, targets, row_weight, keep=False)[0]
        if tape is None:
            return _DelayedCrossEntropy.apply(rows, self.weight, self, targets, row_weight)
        record = tape.record(self, (), rows.new_empty((), dtype=wide_dtype(rows)))
        loss, *kept = _RescaledCrossEntropy.apply(rows, record.probe, self.weight.detach(), self, targets, row_weight)
        record.saved = (rows.detach(), *kept) if row_weight is None else (rows.detach(), *kept, row_weight)
        record.integers = (targets.columns, targets.owned)
        return loss

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        rows, local, own, by_rank, *row_weight, columns, owned = saved
        share, at_target = self.shares(own, by_rank)
        cross_entropy_logit_gradient(local[:, : self.num_columns], columns, owned, share, at_target)
        return [(self.weight, loss_weight_gradient(rows, local, row_weight[0] if row_weight else None, gradient))]

    def shares(self, own: Tensor, by_rank: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the sum of exponentials over all ranks [n], and a factor [n]: the gradient of a
        row's loss is that share times the gradient with the rank's own softmax, minus the factor in the target's
        column.

        own: the rank's statistics [3, n]. by_rank: of all ranks [ranks, 3, n].
        """
        share = torch.exp(merged(own.unsqueeze(0))[0] - merged(by_rank)[0])
        slope = slope_at(own[2], self.softcap)
        return share, 1 - share if slope is None else (1 - share) * slope


def row_weights(loss_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the weights of the rows [n], in fp32 (fp64 for fp64), for a mask of any shape; None for 1."""
    return None if loss_mask is None else loss_mask.flatten().to(wide_dtype(like))


def loss_and_logit_gradient(
    rows: Tensor, weight: Tensor, head: VocabParallelHead, targets: Targets, row_weight: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss sum and, if `keep`, the gradient of each row's unweighted loss with respect to its logits [n,
    stored columns]."""
    op = head.loss_op(rows)
    group, columns, owned = head.group, targets.columns, targets.owned
    gradient = None
    if keep:
        own, gradient = op.statistics_and_gradient(
            rows, weight, columns, owned, head.num_columns, group.size == 1, **head.capped
        )
    else:
        own = op.statistics(rows, weight, columns, owned, head.num_columns, **head.capped)
    log_sum_exp, loss = merged_loss(own, group, targets, row_weight)
    if gradient is not None and group.size > 1:
        op.complete_gradient(gradient, columns, owned, head.num_columns, own, log_sum_exp, **head.capped)
    return loss, gradient


def merged_loss(own: Tensor, group: Group, targets: Targets, row_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row [n] and the loss sum, from each rank's own statistics [3, n]."""
    return loss_of_statistics(gather_from_group(own.unsqueeze(0), group, dim=0), targets, row_weight)


def loss_of_statistics(by_rank: Tensor, targets: Targets, row_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row [n] and the loss sum, from the statistics of all ranks [ranks, 3, n]."""
    log_sum_exp, target = merged(by_rank)
    losses = (log_sum_exp - target).masked_fill(~targets.known, torch.nan)
    return log_sum_exp, losses.sum() if row_weight is None else (losses * row_weight).sum()


def loss_input_gradient(weight: Tensor, logit_gradient: Tensor, row_weight: Tensor | None, dloss: Tensor) -> Tensor:
    """Return the gradient [n, h] of the rows."""
    return (logit_gradient @ weight).mul_(_row_scale(row_weight, dloss))


def loss_weight_gradient(rows: Tensor, logit_gradient: Tensor, row_weight: Tensor | None, dloss: Tensor) -> Tensor:
    """Return the gradient [stored columns, h] of the weight. Scaling the rows is cheaper than scaling the result."""
    scaled = torch.mul(rows, _row_scale(row_weight, dloss), out=torch.empty_like(rows))
    return weight_gradient(scaled, logit_gradient)


def _row_scale(row_weight: Tensor | None, dloss: Tensor) -> Tensor:
    """Return the factor of each row's gradient, [n, 1] or [1, 1] in the loss's precision, because bf16 would round it
    by up to one part in 500. (A number without dimensions would be rounded to the rows' precision by torch.)"""
    return dloss.view(1, 1) if row_weight is None else (dloss * row_weight).unsqueeze(1)


def _scales(row_weight: Tensor | None, dloss: Tensor, num_rows: int) -> Tensor:
    """Return the factor of each row's gradient, [n]."""
    return dloss.expand(num_rows).contiguous() if row_weight is None else dloss * row_weight


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        head: VocabParallelHead,
        targets: Targets,
        row_weight: Tensor | None,
        keep: bool,
        kept: Tensor,
    ) -> Tensor:
        loss, gradient = loss_and_logit_gradient(rows, weight, head, targets, row_weight, keep)
        ctx.save_for_backward(kept, weight, gradient, row_weight)
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, gradient, row_weight = ctx.saved_tensors
        dx = loss_input_gradient(weight, gradient, row_weight, dloss) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = loss_weight_gradient(ctx.head.rows_of(kept), gradient, row_weight, dloss)
        return dx, dweight, None, None, None, None, None


def _start_loss(
    ctx: Any, rows: Tensor, weight: Tensor, head: SharedHead, targets: Targets, *, alone: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Start gathering the statistics of all ranks. Return a loss of 0, which the backward overwrites through
    `ctx.loss`, the statistics of this rank, and the gradient of the logits so far. alone: it is complete with the
    rank's own softmax."""
    own, gradient = head.loss_op(rows).statistics_and_gradient(
        rows, weight, targets.columns, targets.owned, head.num_columns, alone, **head.capped
    )
    # The gather fills it after it was saved.
    ctx.by_rank = own.new_empty((head.group.size, *own.shape))
    ctx.gathered = head.group.gather_into(ctx.by_rank.view(-1), own.contiguous().view(-1))
    loss = own.new_zeros(())
    ctx.head, ctx.targets, ctx.loss = head, targets, loss.detach()
    return loss, own, gradient


class _DelayedCrossEntropy(torch.autograd.Function):
    """The forward starts gathering the statistics of all ranks, and the backward completes loss and gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, head: SharedHead, targets: Targets, row_weight: Tensor | None
    ) -> Tensor:
        loss, own, gradient = _start_loss(ctx, rows, weight, head, targets, alone=False)
        ctx.save_for_backward(rows, weight, gradient, row_weight, own)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, gradient, row_weight, own = ctx.saved_tensors
        head, targets = ctx.head, ctx.targets
        ctx.gathered.wait()
        log_sum_exp, loss = loss_of_statistics(ctx.by_rank, targets, row_weight)
        ctx.loss.copy_(loss)
        head.loss_op(rows).complete_gradient(
            gradient, targets.columns, targets.owned, head.num_columns, own, log_sum_exp, **head.capped
        )
        dx = loss_input_gradient(weight, gradient, row_weight, dloss)
        return dx, loss_weight_gradient(rows, gradient, row_weight, dloss), None, None, None


class _RescaledCrossEntropy(torch.autograd.Function):
    """Return the loss, and the tensors for the weight half: the gradient of the logits with the rank's own softmax,
    and the statistics of the rank and of all ranks. The forward starts gathering the statistics, and multiplies the
    gradient by the matrix; the input half rescales the product. The probe receives the loss's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probe: Tensor,
        weight: Tensor,
        head: SharedHead,
        targets: Targets,
        row_weight: Tensor | None,
    ) -> Tensors:
        loss, own, gradient = _start_loss(ctx, rows, weight, head, targets, alone=True)
        ctx.save_for_backward(gradient @ weight, weight, row_weight, own)
        ctx.mark_non_differentiable(gradient, own, ctx.by_rank)
        ctx.set_materialize_grads(False)
        return loss, gradient, own, ctx.by_rank

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        product, weight, row_weight, own = ctx.saved_tensors
        head, targets = ctx.head, ctx.targets
        ctx.gathered.wait()
        ctx.loss.copy_(loss_of_statistics(ctx.by_rank, targets, row_weight)[1])
        share, at_target = head.shares(own, ctx.by_rank)
        scale = _row_scale(row_weight, dloss)
        dx = product.mul_(share.unsqueeze(1) * scale)
        at_target = (at_target * targets.owned).unsqueeze(1) * scale
        dx -= weight[targets.columns].mul_(at_target)
        return dx, dloss, None, None, None, None


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: VocabParallelHead,
        labels: Tensor,
        row_weight: Tensor | None,
        kept: Tensor,
    ) -> Tensor:
        targets = head._targets(labels, row_weight)
        op = head.loss_op(rows)
        own = op.statistics(rows, weight, targets.columns, targets.owned, head.num_columns, bias, **head.capped)
        log_sum_exp, loss = merged_loss(own, head.group, targets, row_weight)
        ctx.save_for_backward(kept, weight, bias, labels, row_weight, log_sum_exp)
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, bias, labels, row_weight, log_sum_exp = ctx.saved_tensors
        head = ctx.head
        rows = head.rows_of(kept)
        op = head.loss_op(rows)
        scale = _scales(row_weight, dloss, len(rows))
        columns, owned = head.columns_of(labels)
        gradients = op.backward(
            rows, weight, columns, owned, head.num_columns, log_sum_exp, scale, bias, **head.capped
        )
        return (*gradients, *[None] * (7 - len(gradients)))


class _ProbedCrossEntropy(torch.autograd.Function):
    """The forward and the input half of a split backward. The weight is detached; the probe receives the loss's
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probe: Tensor,
        weight: Tensor,
        head: VocabParallelHead,
        targets: Targets,
        row_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        loss, gradient = loss_and_logit_gradient(rows, weight, head, targets, row_weight, keep=True)
        assert gradient is not None
        ctx.save_for_backward(weight, gradient, row_weight)
        ctx.mark_non_differentiable(gradient)
        # Autograd would fill a gradient of the gradient with zeros.
        ctx.set_materialize_grads(False)
        return loss, gradient

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weight, gradient, row_weight = ctx.saved_tensors
        dx = loss_input_gradient(weight, gradient, row_weight, dloss) if ctx.needs_input_grad[0] else None
        return dx, dloss, None, None, None, None


class MaskedTokenHead(VocabParallelHead):
    """Projection of hidden states to the vocabulary, with a bias.

    shapes: of `weight` (stored rows, hidden) and `bias` (stored rows,); rows after the true vocabulary are padding.
    """

    def loss_sum(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, tape: SplitTape | None) -> Tensor:
        if self.recompute:
            return self.recomputed_loss_sum(x, labels, loss_mask, tape)
        return self.loss_of(self.local_logits(x, tape), labels, loss_mask)

    def loss_of(self, local: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the weighted sum of the cross entropies of `local_logits` [..., stored rows], a scalar in fp32 (fp64
        for fp64).

        labels: int64 [...]. weights: [...], None for 1. Raises ValueError as `VocabParallelHead.loss_sum` does.
        """
        row_weight = row_weights(weights, local)
        targets = self._targets(labels.flatten(), row_weight)
        return _CrossEntropy.apply(local.flatten(0, -2), self, targets, row_weight)

    def correct(self, local: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted number of rows whose largest logit is the label's: float32, 0-dim, the same on every
        rank."""
        columns = local.detach().flatten(0, -2)[:, : self.num_columns].float()
        if self.num_columns:
            best, place = columns.max(dim=-1)
        else:  # a rank may only have padding
            best = columns.new_full((len(columns),), -torch.inf)
            place = torch.zeros_like(best, dtype=torch.int64)
        candidates = torch.stack([best.double(), (place + self.first_column).double()]).unsqueeze(0)
        by_rank = gather_from_group(candidates, self.group, dim=0)
        winner = by_rank[:, 0].argmax(dim=0, keepdim=True)
        predicted = by_rank[:, 1].gather(0, winner).squeeze(0)
        return ((predicted == labels.flatten()) * weights.flatten().float()).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, head: MaskedTokenHead, targets: Targets, row_weight: Tensor | None) -> Tensor:
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
        scale = _scales(row_weight, dloss, len(gradient))
        op.gradient(gradient, ctx.targets.columns, ctx.targets.owned, log_sum_exp, scale)
        padding = ctx.stored - gradient.shape[1]
        return torch.nn.functional.pad(gradient, (0, padding)) if padding else gradient, None, None, None
