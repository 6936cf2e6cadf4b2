"""Which experts a token goes to, and with what shares (Shazeer et al. 2017, arXiv 1701.06538, section 2.1)."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megapipe.layers.linear import Shapes, empty_parameter
from megapipe.layers.remade import Remade, save_input, saved_input
from megapipe.layers.sequence_shard import OnShards
from megapipe.layers.split import SplitModule, SplitTape


class Router(SplitModule, OnShards):
    """Scores every expert for every token, in fp32 whatever the rest computes in: small differences decide.

    Every tensor rank has the whole weight [experts, h] and the same tokens, and so the same scores; where tokens are
    sharded each scores its own. shapes: of `weight` and, where loads are evened out, of `bias` [experts], which is
    added to the softmax of the scores when experts are chosen and in nothing else (Wang et al. 2024, arXiv 2408.15664,
    equation 3). biased: "scores" adds it to the scores instead, as version 0.1 did. The bias's gradient is not the
    loss's: it is how many more tokens than its share each expert got, times the number of experts, a sum over tokens
    as other gradients are.
    """

    partial = ("weight", "bias")

    def __init__(self, shapes: Shapes, choices: int, normalize: bool, biased: Literal["shares", "scores"]) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None
        self.choices = choices
        self.normalize = normalize
        self.biased = biased

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> tuple[Tensor, Tensor]:
        """(shares, experts) [b, s, choices] for x [b, s, h]: of each token the experts that it goes to, int64, the
        best first, equal ones by number, and what share of the result each has, fp32 (fp64 for fp64).

        Shares are a softmax over the chosen alone where the router normalises them (Jiang et al. 2024, arXiv
        2401.04088, section 2.1), else their part of the softmax over all (Fedus et al. 2022, arXiv 2101.03961).
        again: makes x again in the backward, so that x need not be kept.
        """
        record = None
        if tape is None:
            scores = _FusedRouter.apply(x, self.weight, again)
        else:
            record = tape.record(self, (*x.shape[:-1], self.weight.shape[0]), x.new_empty((), dtype=_wide(x)))
            record.saved, record.again = ((x.detach(),), None) if again is None else (again.sources, again)
            scores = _ProbedRouter.apply(x, record.probe, self.weight.detach())
        ranked = scores.detach()
        if self.bias is not None:
            ranked = (ranked.softmax(-1) if self.biased == "shares" else ranked) + self.bias.detach()
        experts = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : self.choices].contiguous()
        if self.bias is not None:
            load = self._load(experts)
            if record is None:
                scores = _Loaded.apply(scores, self.bias, load)
            else:
                record.beside = (load,)
        if self.normalize:
            return scores.gather(-1, experts).softmax(-1), experts
        return scores.softmax(-1).gather(-1, experts), experts

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        yield self.weight, _weight_gradient(saved[0], gradient)
        if self.bias is not None:
            yield self.bias, saved[1]

    def _load(self, experts: Tensor) -> Tensor:
        """int64 [experts]: pairs of a token and one of its choices beyond an even share, times the experts."""
        num_experts, flat = self.weight.shape[0], experts.flatten()
        counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        return num_experts * counts - flat.numel()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(_wide(x)) @ weight.to(_wide(x)).t()


def _input_gradient(dtype: torch.dtype, weight: Tensor, dscores: Tensor) -> Tensor:
    return (dscores @ weight.to(dscores.dtype)).to(dtype)


def _weight_gradient(x: Tensor, dscores: Tensor) -> Tensor:
    """In the dtype of the scores, as wide as what gradients are summed in."""
    return dscores.flatten(0, -2).t() @ x.to(dscores.dtype).flatten(0, -2)


class _Loaded(torch.autograd.Function):
    """The scores as they are; the bias that they were chosen with gets its load."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (load,) = ctx.saved_tensors
        return gradient, load.to(gradient.dtype), None


class _FusedRouter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, again: Remade | None) -> Tensor:
        save_input(ctx, x, again, weight)
        ctx.dtype = x.dtype
        return _scores(x, weight)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = _input_gradient(ctx.dtype, weight, dscores) if needs_x else None
        dweight = None
        if needs_weight:
            dweight = _weight_gradient(saved_input(ctx, kept), dscores)
        return dx, dweight, None


class _ProbedRouter(torch.autograd.Function):
    """The input half: the weight comes detached, the probe receives the scores' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        return _scores(x, weight)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (weight,) = ctx.saved_tensors
        dx = _input_gradient(ctx.dtype, weight, dscores) if ctx.needs_input_grad[0] else None
        return dx, dscores, None
