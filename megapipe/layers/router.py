"""Which experts a token goes to, and with what shares (Shazeer et al. 2017, arXiv 1701.06538, section 2.1)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.linear import Shapes, empty_parameter
from megapipe.layers.remade import Remade
from megapipe.layers.sequence_shard import OnShards
from megapipe.layers.split import SplitModule, SplitTape


class Router(SplitModule, OnShards):
    """A score for every expert, in fp32 whatever the rest computes in: small differences decide.

    Every tensor rank has the whole weight [experts, h] and the same tokens, and so the same scores; where tokens are
    sharded each scores its own. shapes: of `weight`.
    """

    partial = ("weight",)

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """x [b, s, h] to scores [b, s, experts]. again: makes x again in the backward, so that x need not be kept."""
        if tape is None:
            return _Fused.apply(x, self.weight, again)
        scores_of_none = x.new_empty((), dtype=_wide(x))
        record = tape.record(self, (*x.shape[:-1], self.weight.shape[0]), scores_of_none)
        if again is None:
            record.saved = (x.detach(),)
        else:
            record.saved, record.again = again.sources, again
        return _Probed.apply(x, record.probe, self.weight.detach())

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        yield self.weight, _weight_gradient(saved[0], gradient, self.weight.dtype)


def choose(scores: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(shares, experts) [b, s, choices]: of each token the best scores' experts, int64, the best first, equal ones by
    number, and what share of the result each has, in the dtype of the scores.

    normalize: shares are a softmax over the chosen alone (Jiang et al. 2024, arXiv 2401.04088, section 2.1), else the
    chosen's part of a softmax over all (Fedus et al. 2022, arXiv 2101.03961, section 2.1).
    """
    experts = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :choices].contiguous()
    if normalize:
        return scores.gather(-1, experts).softmax(-1), experts
    return scores.softmax(-1).gather(-1, experts), experts


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(_wide(x)) @ weight.to(_wide(x)).t()


def _input_gradient(x_like: torch.dtype, weight: Tensor, dscores: Tensor) -> Tensor:
    return (dscores @ weight.to(dscores.dtype)).to(x_like)


def _weight_gradient(x: Tensor, dscores: Tensor, dtype: torch.dtype) -> Tensor:
    return (dscores.flatten(0, -2).t() @ x.to(dscores.dtype).flatten(0, -2)).to(dtype)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, again: Remade | None) -> Tensor:
        ctx.save_for_backward(weight, *(() if again is not None else (x,)))
        ctx.again, ctx.dtype = again, x.dtype
        return _scores(x, weight)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = _input_gradient(ctx.dtype, weight, dscores) if needs_x else None
        dweight = None
        if needs_weight:
            dweight = _weight_gradient(kept[0] if ctx.again is None else ctx.again(), dscores, weight.dtype)
        return dx, dweight, None


class _Probed(torch.autograd.Function):
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
