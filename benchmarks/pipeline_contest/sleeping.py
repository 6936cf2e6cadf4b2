"""A stage that sleeps: the remaining time and processor time of a step are the overhead of the runtime."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.split import SplitModule, SplitTape

ZERO = torch.zeros(1)


@dataclass
class Meter:
    """Time that the stages of one rank used in a step.

    processor: seconds of processor time inside stage callables. late: seconds overslept.
    """

    processor: float = 0.0
    late: float = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.late += time.perf_counter() - start - seconds

    def reset(self) -> None:
        self.processor = self.late = 0.0


class _SleepBackward(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter, seconds: float) -> Tensor:
        ctx.meter, ctx.seconds = meter, seconds
        return x.data  # not a view, because torch detaches outputs in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start = time.thread_time()
        ctx.meter.sleep(ctx.seconds)
        ctx.meter.processor += time.thread_time() - start
        # No other code holds this tensor, so autograd uses it as the gradient of an input instead of a copy.
        return gradients[0].detach(), None, None


class _Join(torch.autograd.Function):
    """The identity of its first argument, with the second one in the graph: a probe gets the gradient, a weight gets
    0.

    The gradient of `x` is the tensor `gradient` of the stage, because a real stage creates a gradient and does not
    pass on the incoming one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, gradient: Tensor) -> Tensor:
        ctx.probe, ctx.gradient = other.shape == x.shape, gradient
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.gradient.detach(), gradients[0] if ctx.probe else ZERO, None


class _Loss(torch.autograd.Function):
    """A loss of zero, whose gradient with respect to `x` is `gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class SleepingStage(SplitModule):
    """The identity, without arithmetic. The forward sleeps `seconds`, and so does each half of the backward.

    The node of the input half follows the join with the weight, so that this half also runs if the input needs no
    gradient.
    """

    def __init__(self, seconds: float, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._seconds = seconds
        self._meter = meter
        self._gradient = torch.empty(0)

    def forward(self, x: Tensor, tape: SplitTape | None = None) -> Tensor:
        start = time.thread_time()
        self._meter.sleep(self._seconds)
        if self._gradient.shape != x.shape:
            self._gradient = torch.zeros_like(x)
        if tape is None:
            late_weight = _SleepBackward.apply(self.weight, self._meter, self._seconds)
            joined = _Join.apply(x, late_weight, self._gradient)
        else:
            joined = _Join.apply(x, tape.record(self, x.shape, x).probe, self._gradient)
        y = _SleepBackward.apply(joined, self._meter, self._seconds)
        self._meter.processor += time.thread_time() - start
        return y

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        start = time.thread_time()
        self._meter.sleep(self._seconds)
        self._meter.processor += time.thread_time() - start
        yield self.weight, ZERO


def sleeping_loss(y: Tensor, gradient: Tensor) -> Tensor:
    """Return a loss without arithmetic. gradient: gradient of `y`, whatever the gradient of the loss is."""
    return _Loss.apply(y, gradient)
