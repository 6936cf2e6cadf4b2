"""The feed-forward half of a block: an MLP, or a mixture of experts in its place.

The experts are sharded over the tensor ranks (PPMoE, arXiv 2304.11414). Tensor ranks have the same tokens after
attention, so each picks the tokens of its own experts, and the sum that a row-parallel MLP needs anyway combines the
results: no token is sent between ranks, and no token is dropped. A router chooses the experts of a token and their
weights (Shazeer et al. 2017, arXiv 1701.06538, section 2.1). A shared expert is an MLP that processes every token (Dai
et al. 2024, arXiv 2401.06066, section 3.2).

Tokens are copied to the rows of their experts and back; each direction is the transpose of the other. Both directions
gather: sums are over a token's own experts in the order of its choices, so results are deterministic without atomic
additions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.kernels.reference.norms import wide, wide_dtype
from megapipe.kernels.registry import Registry
from megapipe.layers.linear import (
    ColumnParallelLinear,
    FusedLinear,
    Linear,
    OnShards,
    ProbedLinear,
    Products,
    RowParallelLinear,
    Shapes,
    WeightAndBias,
    as_matrix,
    bias_gradient,
    empty_parameter,
    within,
)
from megapipe.layers.split import Rerun, SplitModule, SplitTape, Tensors, WeightGradients
from megapipe.parallel.collectives import joined, start_gather
from megapipe.parallel.groups import Group

SMALLEST_SUM = 1e-20
"""Added to the sum of the chosen experts' sigmoids before dividing by it, as in DeepSeek-V3."""


class Router(SplitModule, OnShards):
    """Scores every expert for every token, in fp32 whatever the compute dtype, because small differences decide the
    choice.

    Every tensor rank has the whole weight [experts, h] and the same tokens, and so the same scores; if tokens are
    sharded, each rank scores its own. shapes: of `weight`, of `score_bias` [experts] if the linear layer has a bias,
    and, if loads are balanced, of `bias` [experts], which is added to the softmax or the sigmoids of the scores only
    for the choice of experts (Wang et al. 2024, arXiv 2408.15664, equation 3). model.expert_bias "scores" adds it to
    the scores instead, as version 0.1 did. The bias's gradient is not that of the loss: it is the number of tokens
    above an even share that each expert got, times the number of experts, a sum over tokens like other gradients.
    """

    partial = ("weight", "score_bias", "bias")

    def __init__(self, model: ModelConfig, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.score_bias = empty_parameter(shapes["score_bias"]) if "score_bias" in shapes else None
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None
        self.model = model

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> tuple[Tensor, Tensor]:
        """Return (shares, experts) [b, s, choices] for x [b, s, h]: the experts of each token, int64, best first, ties
        by number, and their weights in the result, fp32 (fp64 for fp64).

        rerun: recomputes x in the backward, so that x is not saved.
        """
        score_bias = self.score_bias
        record = None
        if tape is None:
            scores = FusedLinear.apply(x, self.weight, score_bias, True, rerun, _WIDE)
        else:
            record = tape.record(self, (*x.shape[:-1], self.weight.shape[0]), x.new_empty((), dtype=wide_dtype(x)))
            record.keep_input(x, rerun)
            bias = None if score_bias is None else score_bias.detach()
            scores = ProbedLinear.apply(x, record.probe, self.weight.detach(), bias, _WIDE)
        experts = self._choices(scores.detach())
        if self.bias is not None:
            load = self._load(experts)
            if record is None:
                scores = _Loaded.apply(scores, self.bias, load)
            else:
                record.integers = (load,)
        return self._shares(scores, experts), experts

    def _choices(self, scores: Tensor) -> Tensor:
        """Return the experts [b, s, choices] for scores [b, s, experts], chosen only from the best groups."""
        model, ranked = self.model, scores
        if model.router_scores == "sigmoid":
            ranked = scores.sigmoid()
        elif self.bias is not None and model.expert_bias == "shares":
            ranked = scores.softmax(-1)
        if self.bias is not None:
            ranked = ranked + self.bias.detach()
        if model.router_groups > 1:
            grouped = ranked.unflatten(-1, (model.router_groups, -1))
            order = grouped.topk(model.best_of_group).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
            left_out = torch.zeros_like(order, dtype=torch.bool)
            left_out.scatter_(-1, order[..., model.router_groups_chosen :], True)
            ranked = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
        return order[..., : model.experts_per_token].contiguous()

    def _shares(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the shares [b, s, choices] of the chosen experts.

        If the router normalises them, they are a softmax over the chosen experts only (Jiang et al. 2024, arXiv
        2401.04088, section 2.1), or sigmoids divided by the sum over the chosen experts (DeepSeek-AI 2024, arXiv
        2412.19437, equations 13 to 15). Otherwise they are entries of the softmax over all experts (Fedus et al. 2022,
        arXiv 2101.03961), or the sigmoids themselves.
        """
        normalize = self.model.normalize_expert_shares
        if self.model.router_scores == "sigmoid":
            shares = scores.gather(-1, experts).sigmoid()
            if normalize:
                shares = shares / (shares.sum(-1, keepdim=True) + SMALLEST_SUM)
        elif normalize:
            shares = scores.gather(-1, experts).softmax(-1)
        else:
            shares = scores.softmax(-1).gather(-1, experts)
        return shares if self.model.router_scale == 1 else shares * self.model.router_scale

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        yield self.weight, _WIDE.weight_gradient(saved[0], gradient)
        if self.score_bias is not None:
            yield self.score_bias, bias_gradient(gradient)
        if self.bias is not None:
            yield self.bias, saved[1]

    def _load(self, experts: Tensor) -> Tensor:
        """Return, int64 [experts], the number of (token, choice) pairs above an even share, times the number of
        experts."""
        num_experts, flat = self.weight.shape[0], experts.flatten()
        counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        return num_experts * counts - flat.numel()


class _WideProducts(Products):
    """Products in fp32 (fp64 for fp64) of operands of one dtype. The weight's gradient is as wide as gradient sums."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scores = wide(x) @ wide(weight).t()
        return scores if bias is None else scores.add_(bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return (dy @ weight.to(dy.dtype)).to(weight.dtype)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        return dy.flatten(0, -2).t() @ x.to(dy.dtype).flatten(0, -2)


_WIDE = _WideProducts()


class _Loaded(torch.autograd.Function):
    """Return the scores unchanged; the gradient of the bias for the choice of experts is their load."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (load,) = ctx.saved_tensors
        return gradient, load.to(gradient.dtype), None


@dataclass(frozen=True)
class Assignment:
    """The tokens that the experts of one rank process. A pair is a token and one of its k choices, with number token x
    k + i.

    pairs: int64 [n], the pairs of this rank's n rows: expert by expert, ascending within each.
    rows: int64 [tokens x k], the row of every pair, n for pairs of other ranks' experts.
    counts: rows of each of this rank's experts. choices: k.
    """

    pairs: Tensor
    rows: Tensor
    counts: tuple[int, ...]
    choices: int


def assign(chosen: Tensor, first: int, num_experts: int) -> Assignment:
    """Return the rows of experts first to first + num_experts - 1. chosen: integers [tokens, k], every token's
    experts.

    Waits for the device, because the number of rows must be known.
    """
    local = chosen.flatten() - first
    place = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    counts = torch.bincount(place, minlength=num_experts + 1)[:num_experts].tolist()
    pairs = torch.argsort(place, stable=True)[: sum(counts)].clone()
    rows = torch.full_like(place, len(pairs))
    rows[pairs] = torch.arange(len(pairs), device=chosen.device)
    return Assignment(pairs, rows, tuple(counts), chosen.shape[-1])


def assign_evenly(chosen: Tensor, num_experts: int, num_all: int) -> Assignment:
    """Return what `assign` returns, for the meta device, whose tensors have no values: each of `num_all` experts gets
    an even share."""
    pairs = chosen.numel()
    counts = [pairs * (expert + 1) // num_all - pairs * expert // num_all for expert in range(num_experts)]
    flat = chosen.flatten()
    return Assignment(flat.new_empty(sum(counts)), flat, tuple(counts), chosen.shape[-1])


def pick_rows(tokens: Tensor, assignment: Assignment) -> Tensor:
    """Return the rows [n, h] for tokens [tokens, h]; a token's gradient is the sum of its rows' gradients."""
    return _ExpertRows.apply(tokens, assignment.pairs, assignment.rows, assignment.choices, True)


def sum_rows(rows: Tensor, assignment: Assignment) -> Tensor:
    """Return, for every token, the sum [tokens, h] of its rows among [n, h]; zeros for a token without rows."""
    return _ExpertRows.apply(rows, assignment.pairs, assignment.rows, assignment.choices, False)


def _picked(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    return tokens.index_select(0, pairs // choices)


def _summed(values: Tensor, rows: Tensor, choices: int) -> Tensor:
    elsewhere = values.new_zeros(1, values.shape[-1])
    by_choice = torch.cat([values, elsewhere]).index_select(0, rows)
    return by_choice.view(-1, choices, values.shape[-1]).sum(1)


class _ExpertRows(torch.autograd.Function):
    """Pick the rows of tokens, or sum them: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pairs: Tensor, rows: Tensor, choices: int, picks: bool) -> Tensor:
        ctx.save_for_backward(rows if picks else pairs)
        ctx.choices, ctx.picks = choices, picks
        return _picked(values, pairs, choices) if picks else _summed(values, rows, choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (places,) = ctx.saved_tensors
        transposed = _summed if ctx.picks else _picked
        return transposed(gradient, places, ctx.choices), None, None, None, None


class GroupedProducts(Products):
    """Products of rows with the matrices of their experts. counts: rows of each expert, in order; they may be 0.

    x: [n, in]. dy: [n, out]. Weights are [experts, ..., in], biases [experts, ...]; an expert without rows has a
    gradient of zeros.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts

    def width(self, weight: Tensor) -> int:
        return weight[0].numel() // weight.shape[-1]

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(len(x), self.width(weight))
        for expert, rows in self._spans():
            matrix = as_matrix(weight[expert]).t()
            if bias is None:
                torch.mm(x[rows], matrix, out=y[rows])
            else:
                torch.addmm(bias[expert].flatten(), x[rows], matrix, out=y[rows])
        return y

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        dx = dy.new_empty(len(dy), weight.shape[-1])
        for expert, rows in self._spans():
            torch.mm(dy[rows], as_matrix(weight[expert]), out=dx[rows])
        return dx

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        gradients = x.new_zeros(len(self.counts), dy.shape[-1], x.shape[-1])
        for expert, rows in self._spans():
            torch.mm(dy[rows].t(), x[rows], out=gradients[expert])
        return gradients

    def bias_gradient(self, dy: Tensor) -> Tensor:
        gradients = dy.new_zeros(len(self.counts), dy.shape[-1])
        for expert, rows in self._spans():
            torch.sum(dy[rows], 0, out=gradients[expert])
        return gradients

    def _spans(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, with their range."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


class GroupedLinear(WeightAndBias):
    """y = x W_e^T + b_e for the rows x of expert e.

    shapes: of `weight` [experts, ..., in], all axes between being output axes, and, where there is one, of `bias`
    [experts, ...]: of this rank's experts.
    """

    def forward(
        self, x: Tensor, products: GroupedProducts, tape: SplitTape | None, rerun: Rerun | None = None
    ) -> Tensor:
        """Map rows [n, in] to [n, out], with output axes flattened into one.

        rerun: recomputes x for the gradient of W, so that x is not saved.
        """
        y = self.product(x, tape, products, x.shape[:-1], rerun, add_bias=True)
        if tape is not None:  # the product's only record is the last one
            tape.records[-1].integers = (torch.tensor(products.counts),)
        return y

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        x, counts = saved
        products = GroupedProducts(counts.tolist())
        yield self.weight, products.weight_gradient(x, gradient).view(self.weight.shape)
        if self.bias is not None:
            yield self.bias, products.bias_gradient(gradient).view(self.bias.shape)


class Experts(nn.Module, OnShards):
    """hidden -> ffn -> hidden in the experts that are chosen for each token; rank j of t has the j-th part of the
    experts, each of them whole.

    shapes: of `router.weight` (experts, hidden) and its biases, and of this rank's experts: `up.weight`
    (experts, ffn, hidden), or (experts, 2, ffn, hidden) with the gate first for SwiGLU, `down.weight`
    (experts, hidden, ffn) and biases; of a `shared` expert likewise. recompute: recompute the activation in the
    backward instead of saving it.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.router = Router(model, within(shapes, "router"))
        self.up = GroupedLinear(within(shapes, "up"))
        self.down = GroupedLinear(within(shapes, "down"))
        shared = within(shapes, "shared")
        self.shared = SharedExpert(model, shared, group, kernels) if shared else None
        self.activation = model.activation_kind
        self.recompute = False
        self.group = group
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, h]. rerun: recomputes x in the backward; the rows picked from it are
        saved.

        Gradients of tokens and of shares are summed over the ranks, because each rank only has the part from its own
        experts; so gradients of the scores and of the router are the same on every rank.
        """
        own_x = x
        shares, chosen = self.router(x, tape, rerun)
        x, shares = self.on_all_tokens(x, self.group), self.on_all_tokens(shares, self.group)
        if self.sequence is not None:
            chosen = joined(start_gather(chosen, self.group)())
        num_experts, chosen = self.up.weight.shape[0], chosen.flatten(0, -2)
        if chosen.is_meta:
            assignment = assign_evenly(chosen, num_experts, self.router.weight.shape[0])
        else:
            assignment = assign(chosen, self.group.rank * num_experts, num_experts)
        rows = pick_rows(x.flatten(0, -2), assignment)
        products = GroupedProducts(assignment.counts)
        inner = self.up(rows, products, tape)
        activate = self._activation(inner)
        rerun_activation = Rerun(activate, (inner.detach(),)) if self.recompute else None
        rows = self.down(activate(inner), products, tape, rerun_activation)
        weights = shares.flatten().index_select(0, assignment.pairs).unsqueeze(-1)
        y = sum_rows(rows * weights.to(rows.dtype), assignment).view(x.shape)
        y = self.summed_over(y, self.group)
        if self.shared is None:
            return y
        self.shared.recompute = self.recompute
        return y + self.shared(own_x, tape, rerun)

    def _activation(self, inner: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the activation function. A rank without rows uses the reference, because kernels do not support empty
        tensors."""
        kind = self.activation
        op = self.kernels.pick(kind.op, inner) if len(inner) else self.kernels.reference(kind.op)
        return lambda inner: op.apply(inner, *kind.arguments)


class MLP(nn.Module):
    """hidden -> ffn -> hidden on one tensor rank, which has an equal part of the ffn channels.

    shapes: of `up.weight` (ffn, hidden), or (2, ffn, hidden) with the gate first if the activation is gated,
    `down.weight` and biases. recompute: recompute the activation in the backward instead of saving it.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(within(shapes, "up"), group)
        self.down = RowParallelLinear(within(shapes, "down"), group)
        self.activation = model.activation_kind
        self.recompute = False
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, h]. rerun: recomputes x in the backward, so that x is not saved."""
        inner, activate = self._before_activation(x, tape, rerun)
        rerun_activation = Rerun(activate, (inner.detach(),)) if self.recompute else None
        return self.down(activate(inner), tape, rerun_activation)

    def _before_activation(
        self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the input of the activation, and the activation, which adds the bias if its kernel can."""
        kind, arguments = self.activation, self.activation.arguments
        if self.up.bias is not None and kind.biased is not None:
            # The linear layer computes the bias's gradient, even if another kernel adds the bias.
            bias = self.up.bias.detach()
            op = self.kernels.pick(kind.biased, bias)
            if op is not self.kernels.reference(kind.biased):
                # Sharded weights may be released before the weight half.
                if self.recompute and tape is not None:
                    bias = bias.clone()
                return self.up.forward(x, tape, rerun, add_bias=False), lambda inner: op.apply(inner, bias, *arguments)
            # Without a fused kernel, adding the bias within the product is cheapest.
            alone = self.kernels.reference(kind.op)
            return self.up(x, tape, rerun), lambda inner: alone.apply(inner, *arguments)
        inner = self.up(x, tape, rerun)
        plain = self.kernels.pick(kind.op, inner)
        return inner, lambda inner: plain.apply(inner, *arguments)


class TokenGate(Linear, OnShards):
    """One number between 0 and 1 for each token. shapes: of `weight` (1, hidden)."""

    partial = ("weight",)

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, 1]. rerun: as in `MLP`."""
        return self.local_product(x, tape, add_bias=True, rerun=rerun).sigmoid()


class SharedExpert(MLP):
    """The expert of every token, whose channels are sharded over tensor ranks.

    shapes: as for an MLP, and of `gate.weight` if a gate scales the result.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__(model, shapes, group, kernels)
        self.gate = TokenGate(within(shapes, "gate"), group) if "gate.weight" in shapes else None

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, h]. rerun: as in `MLP`."""
        y = super().forward(x, tape, rerun)
        return y if self.gate is None else y * self.gate(x, tape, rerun)
