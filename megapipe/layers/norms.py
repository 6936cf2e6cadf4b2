"""Normalisation layers over the last axis, with a split backward."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.kernels.registry import Registry
from megapipe.layers.linear import Shapes, empty_parameter
from megapipe.layers.split import SplitModule, SplitTape
from megapipe.parallel.collectives import reduce_from_group
from megapipe.parallel.groups import Group


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: "Norm", *parameters: Tensor) -> Tensor:
        y, *statistics = norm.kernels.pick(norm.op, x).forward(x, *parameters, norm.epsilon)
        ctx.save_for_backward(x, *statistics, parameters[0])
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _input_gradient(ctx, dy)
        return dx, None, *ctx.norm.weight_gradients(dy, *ctx.saved_tensors)


class _Probed(torch.autograd.Function):
    """The input half: parameters come detached, the probe receives dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, norm: "Norm", *parameters: Tensor) -> tuple[Tensor, ...]:
        y, *statistics = norm.kernels.pick(norm.op, x).forward(x, *parameters, norm.epsilon)
        ctx.save_for_backward(x, *statistics, parameters[0])
        ctx.mark_non_differentiable(*statistics)
        ctx.norm = norm
        ctx.num_parameters = len(parameters)
        return y, *statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return _input_gradient(ctx, dy), dy, None, *(None for _ in range(ctx.num_parameters))


def _input_gradient(ctx: Any, dy: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    x, *rest = ctx.saved_tensors
    return ctx.norm.kernels.pick(ctx.norm.op, x).input_gradient(dy, x, *rest)


class Norm(SplitModule):
    """Normalisation of [..., h] with weight and, where the op has one, bias [h].

    shapes: of `weight` and `bias`. epsilon: added to the variance (mean square). kernels: runs the op.
    gradient_group: ranks that normalise different rows with one weight, so that its gradient is a sum over them.
    """

    op: str

    def __init__(self, shapes: Shapes, epsilon: float, kernels: Registry, gradient_group: Group | None = None) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None
        self.epsilon = epsilon
        self.kernels = kernels
        self.gradient_group = gradient_group

    def forward(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """[..., h] to [..., h]."""
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        if tape is None:
            return _Fused.apply(x, self, *parameters)
        record = tape.record(self, x.shape, x)
        y, *statistics = _Probed.apply(x, record.probe, self, *(parameter.detach() for parameter in parameters))
        record.saved = (x.detach(), *statistics)
        return y

    def weight_gradients(self, dy: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Gradients of weight and bias. rest: the op's statistics and the weight."""
        gradients = self.kernels.pick(self.op, x).weight_gradient(dy, x, *rest)
        if self.gradient_group is None:
            return gradients
        return tuple(reduce_from_group(gradient, self.gradient_group) for gradient in gradients)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        return zip(parameters, self.weight_gradients(gradient, *saved, self.weight), strict=True)


class LayerNorm(Norm):
    """Layer normalisation: mean 0, variance 1, then weight and bias."""

    op = "layer_norm"


class RMSNorm(Norm):
    """Root-mean-square normalisation: mean square 1, then weight."""

    op = "rms_norm"
