"""Normalisation layers over the last axis, with a split backward."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megapipe.kernels.reference.norms import to_dtype, wide
from megapipe.kernels.registry import Implementation, Registry, opaque
from megapipe.layers.linear import OnShards, Shapes, empty_parameter
from megapipe.layers.split import Rerun, SplitModule, SplitTape, Tensors, WeightGradients
from megapipe.parallel.collectives import reduce_from_group
from megapipe.parallel.groups import Group


class _FusedNorm(torch.autograd.Function):
    """The forward and the whole backward. If there is a residual, the sum of x and the residual is normalised, and
    also returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, norm: "Norm", *parameters: Tensor) -> Tensors:
        y, total, statistics = norm.run(x, residual, *parameters)
        ctx.save_for_backward(x if total is None else total, *statistics, parameters[0])
        ctx.norm = norm
        return (y,) if total is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        norm = ctx.norm
        if not any(ctx.needs_input_grad[:2]):
            return None, None, None, *norm.weight_gradients(dy, x, *rest)
        dx, *gradients = norm.implementation(x).backward(dy, x, *rest, dtotal)
        return dx, None if dtotal is None else dx, None, *norm.summed(gradients)


class _ProbedNorm(torch.autograd.Function):
    """The forward and the input half of a split backward. Parameters are detached; the probe receives the gradient dy
    of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, probe: Tensor, norm: "Norm", *parameters: Tensor
    ) -> Tensors:
        y, total, statistics = norm.run(x, residual, *parameters)
        ctx.save_for_backward(x if total is None else total, *statistics, parameters[0])
        ctx.mark_non_differentiable(*statistics)
        ctx.norm = norm
        ctx.added = total is not None
        ctx.num_parameters = len(parameters)
        return (y, *statistics) if total is None else (y, total, *statistics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None for _ in range(ctx.num_parameters))
        if not any(ctx.needs_input_grad[:2]):
            return None, None, dy, None, *nothing
        x, *rest = ctx.saved_tensors
        dx = ctx.norm.implementation(x).input_gradient(dy, x, *rest, others[0] if ctx.added else None)
        return dx, dx if ctx.added else None, dy, None, *nothing


class Norm(SplitModule, OnShards):
    """Normalisation of [..., h] with a weight and, if the op has one, a bias [h].

    op: of the kernel registry, such as layer_norm. shapes: of `weight` and `bias`. epsilon: added to the variance
    (mean square). kernels: runs the op.
    gradient_group: ranks that normalise different rows with the same weight, so that its gradient is a sum over them.
    If tokens are sharded, this is true for every norm, and the step computes the sum. recompute: the layers after the
    norm recompute its result, see `recomputation`.
    """

    partial: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(
        self, op: str, shapes: Shapes, epsilon: float, kernels: Registry, gradient_group: Group | None = None
    ) -> None:
        super().__init__()
        self.op = op
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None
        self.epsilon = epsilon
        self.kernels = kernels
        self.gradient_group = gradient_group
        self.recompute = False

    def forward(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """Map [..., h] to [..., h]."""
        (y,) = self._normalised(x, None, tape)
        return y

    def add(self, x: Tensor, residual: Tensor, tape: SplitTape | None) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum, of x and residual [..., h]; in one pass if the backend supports
        it."""
        y, total = self._normalised(x, residual, tape)
        return y, total

    def _normalised(self, x: Tensor, residual: Tensor | None, tape: SplitTape | None) -> Tensors:
        """Return the normalised tensor and, if there is a residual, the sum."""
        parameters = self._parameters_in_order()
        if tape is None:
            return _FusedNorm.apply(x, residual, self, *parameters)
        record = tape.record(self, x.shape, x)
        detached = [parameter.detach() for parameter in parameters]
        y, *others = _ProbedNorm.apply(x, residual, record.probe, self, *detached)
        if residual is None:
            record.saved = (x.detach(), *others)
            return (y,)
        total, *statistics = others
        record.saved = (total.detach(), *statistics)
        return y, total

    def recomputation(self, x: Tensor, tape: SplitTape | None) -> Rerun | None:
        """Return how to recompute the norm of x (or of the sum in `add`); None if it is saved instead."""
        if not self.recompute:
            return None
        parameters = [parameter.detach() for parameter in self._parameters_in_order()]
        if tape is None:
            return Rerun(lambda x: self.run(x, None, *parameters)[0], (x.detach(),))
        # The weight half may run after sharded weights have been released, so copy these few numbers.
        copies = [parameter.clone() for parameter in parameters]
        return Rerun(lambda x, *copies: self.run(x, None, *copies)[0], (x.detach(), *copies))

    def implementation(self, x: Tensor) -> Implementation:
        """Return the functions that compute the norm of x and its gradients."""
        return self.kernels.pick(self.op, x)

    def run(
        self, x: Tensor, residual: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return the normalised tensor, the sum of x and residual if there is one, and the op's statistics."""
        op = self.implementation(x)
        if residual is None:
            y, *statistics = op.forward(x, *parameters, self.epsilon)
            return y, None, statistics
        y, total, *statistics = op.add_forward(x, residual, *parameters, self.epsilon)
        return y, total, statistics

    def weight_gradients(self, dy: Tensor, x: Tensor, *rest: Tensor) -> Tensors:
        """Return the gradients of weight and bias. rest: the op's statistics and the weight."""
        return self.summed(self.implementation(x).weight_gradient(dy, x, *rest))

    def summed(self, gradients: Sequence[Tensor]) -> Tensors:
        """Sum this rank's gradients of weight and bias over `gradient_group`."""
        if self.gradient_group is None or self.sequence is not None:
            return tuple(gradients)
        return tuple(reduce_from_group(each, self.gradient_group) for each in gradients)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        weight: Tensor = self.weight
        # If it is released: only its shape and dtype are read.
        if weight.untyped_storage().nbytes() == 0:
            weight = torch.zeros_like(weight)
        gradients = self.weight_gradients(gradient, *saved, weight)
        return zip(self._parameters_in_order(), gradients, strict=True)

    def _parameters_in_order(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class ProjectionNorm(Norm):
    """RMS normalisation over all heads of a projection, which are sharded over a group (OLMo 2: Walsh et al. 2024,
    arXiv 2501.00656, section 3.2): x [b, s, kv groups, heads, d], weight [kv groups, heads, d] of this rank.

    Only in torch: a kernel would need contiguous heads, and saving that copy costs memory.
    """

    partial: ClassVar[tuple[str, ...]] = ()

    def __init__(self, shapes: Shapes, epsilon: float, kernels: Registry, group: Group) -> None:
        super().__init__("rms_norm", shapes, epsilon, kernels)
        self._across_heads = AcrossHeads(group=group)

    def implementation(self, x: Tensor) -> Implementation:
        return self._across_heads


class AcrossHeads(Implementation):
    """The functions of a `ProjectionNorm`. group: the ranks over which the heads are sharded."""

    group: Group

    def forward(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the normalised tensor, and the reciprocal root of the mean square [b, s, 1, 1, 1]."""
        x_wide = wide(x)
        rstd = torch.rsqrt(self._mean(x_wide.square()) + epsilon)
        return to_dtype(x_wide * rstd * weight.view(x.shape[2:]), x.dtype), rstd

    def backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and weight."""
        return self.input_gradient(dy, x, rstd, weight, dx), *self.weight_gradient(dy, x, rstd, weight)

    def input_gradient(self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None) -> Tensor:
        """Return the gradient of x. dx: always None, because nothing is added to projections."""
        normalised, scaled = wide(x) * rstd, wide(dy) * weight.view(x.shape[2:])
        return to_dtype((scaled - normalised * self._mean(scaled * normalised)) * rstd, x.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
        """Return the gradient of the weight."""
        return (_projection_weight_gradient(dy, x, rstd, weight),)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean [b, s, 1, 1, 1] over the channels of all ranks."""
        total = reduce_from_group(x.sum((2, 3, 4), keepdim=True), self.group)
        return total / (x.shape[2:].numel() * self.group.size)


@opaque(
    "projection_norm_weight_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor weight) -> Tensor",
    lambda dy, x, rstd, weight: torch.empty_like(weight),
)
def _projection_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (wide(dy) * (wide(x) * rstd)).sum((0, 1)).view(weight.shape).to(weight.dtype)
