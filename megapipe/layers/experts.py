"""A mixture of experts in place of an MLP, its experts shared out over the tensor ranks (PPMoE, arXiv 2304.11414).

Tensor ranks have the same tokens behind attention, so each picks those that go to experts of its own, and the sum that
a row-parallel MLP needs anyway brings the results together: no rank sends a token anywhere. No token is dropped.
"""

from collections.abc import Callable

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.kernels.registry import Registry
from megapipe.layers.dispatch import assign, assign_evenly, pick_rows, sum_rows
from megapipe.layers.grouped_linear import GroupedLinear
from megapipe.layers.linear import Shapes, within
from megapipe.layers.remade import Remade
from megapipe.layers.router import Router
from megapipe.layers.sequence_shard import OnShards
from megapipe.layers.split import SplitTape
from megapipe.parallel.collectives import copy_to_group, reduce_from_group
from megapipe.parallel.groups import Group
from megapipe.parallel.sequence_collectives import gather_tokens, joined, scatter_sum, start_gather


class Experts(nn.Module, OnShards):
    """hidden -> ffn -> hidden in the experts that each token chooses; rank j of t holds the j-th t-th of them, whole.

    shapes: of `router.weight` (experts, hidden) and `router.bias`, and of this rank's experts: `up.weight`
    (experts, ffn, hidden), or (experts, 2, ffn, hidden) with the gate first for SwiGLU, `down.weight`
    (experts, hidden, ffn) and biases.
    recompute: make the activation again in the backward rather than keep it.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.router = Router(
            within(shapes, "router"), model.experts_per_token, model.normalize_expert_shares, model.expert_bias
        )
        self.up = GroupedLinear(within(shapes, "up"))
        self.down = GroupedLinear(within(shapes, "down"))
        self.activation = model.activation_kind
        self.recompute = False
        self.group = group
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """Hidden states [b, s, h] to [b, s, h]. again: makes x again in the backward; the rows picked of it are kept.

        Gradients of tokens and of shares are sums over the ranks, each having those of its own experts; those of the
        scores, and the router's, are then the same on every rank.
        """
        shares, chosen = self.router(x, tape, again)
        if self.sequence is None:
            x, shares = copy_to_group(x, self.group), copy_to_group(shares, self.group)
        else:
            x, shares = gather_tokens(x, self.group), gather_tokens(shares, self.group)
            chosen = joined(start_gather(chosen, self.group)())
        num_experts, chosen = self.up.weight.shape[0], chosen.flatten(0, -2)
        if chosen.is_meta:
            assignment = assign_evenly(chosen, num_experts, self.router.weight.shape[0])
        else:
            assignment = assign(chosen, self.group.rank * num_experts, num_experts)
        rows = pick_rows(x.flatten(0, -2), assignment)
        inner = self.up(rows, assignment.counts, tape)
        activate = self._activation(inner)
        made_again = Remade(activate, (inner.detach(),)) if self.recompute else None
        rows = self.down(activate(inner), assignment.counts, tape, made_again)
        weights = shares.flatten().index_select(0, assignment.pairs).unsqueeze(-1)
        y = sum_rows(rows * weights.to(rows.dtype), assignment).view(x.shape)
        return reduce_from_group(y, self.group) if self.sequence is None else scatter_sum(y, self.group)

    def _activation(self, inner: Tensor) -> Callable[[Tensor], Tensor]:
        """What runs between the products; for a rank without rows the reference, since no kernel starts on nothing."""
        kind = self.activation
        op = self.kernels.pick(kind.op, inner) if len(inner) else self.kernels.reference(kind.op)
        return lambda inner: op.apply(inner, *kind.arguments)
