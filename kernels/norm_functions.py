"""Norms as operators: creates the functions of a backend's layer norm or rms norm from its launches.

A layer norm has the parameters weight and bias and the statistics mean and reciprocal deviation, an rms norm a weight
and the reciprocal root of the mean square: it has the same number of statistics and parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.registry import Implementation


class NormBackward(Protocol):
    """Operands of a norm's gradients. The two halves compute the same bits as the whole backward."""

    def input_gradient(self) -> Tensor:
        """Return the gradient of x, including the part that does not come through the norm."""

    def weight_gradients(self) -> Sequence[Tensor]:
        """Return the gradients of weight and, for a layer norm, bias."""

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients of x, weight and, for a layer norm, bias."""


Forward = Callable[[str, Tensor, Tensor | None, Sequence[Tensor], float], tuple[Tensor, ...]]
"""(op, x, residual, parameters, epsilon) -> (normalised, the sum if there is a residual, statistics)."""

Operands = Callable[[str, Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor | None], NormBackward]
"""(op, dy, x, statistics, weight, the part of dx that does not come through the norm) -> operands."""


def statistic_of(x: Tensor) -> Tensor:
    """Allocate one fp32 number per row of x: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def result_of(x: Tensor) -> Tensor:
    """Allocate a contiguous result in x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def norm_functions(op: str, backend: str, launch: Forward, operands: Operands) -> Implementation:
    """Return the functions of `op`, with the arguments of `megapipe.kernels.reference.norms`, as operators.

    The gradients of weight and bias are sums over all axes but the last.
    """
    parameters = ("weight", "bias") if op == "layer_norm" else ("weight",)
    saved = ("dy", "x", *(("mean", "rstd") if op == "layer_norm" else ("rstd",)), "weight")
    count = len(parameters)  # of statistics too

    def schema(suffix: str, tensors: Sequence[str], last: str, result: str) -> str:
        arguments = ", ".join([*(f"Tensor {name}" for name in tensors), *([last] if last else [])])
        return f"{op}_{backend}{suffix}({arguments}) -> {result}"

    def of(dy: Tensor, x: Tensor, others: Sequence[Tensor | None]) -> NormBackward:
        """Return the operands. others: statistics, weight and, if present, the part of dx that does not come through
        the norm."""
        *statistics, weight, dx = [*others, None][: count + 2]
        return operands(op, dy, x, tuple(statistics), weight, dx)  # type: ignore[arg-type]

    @opaque(
        schema("_input_gradient", saved, "Tensor? dx=None", "Tensor"),
        lambda dy, x, *_: result_of(x),
    )
    def input_gradient(dy: Tensor, x: Tensor, *others: Tensor | None) -> Tensor:
        return of(dy, x, others).input_gradient()

    @opaque(
        schema("_weight_gradient", saved, "", "Tensor[]"),
        lambda dy, x, *others: [result_of(others[-1]) for _ in parameters],
    )
    def weight_gradients(dy: Tensor, x: Tensor, *others: Tensor) -> list[Tensor]:
        return list(of(dy, x, others).weight_gradients())

    @opaque(
        schema("_backward", saved, "Tensor? dx=None", "Tensor[]"),
        lambda dy, x, *others: [result_of(x), *(result_of(others[count]) for _ in parameters)],
    )
    def backward(dy: Tensor, x: Tensor, *others: Tensor | None) -> list[Tensor]:
        return list(of(dy, x, others).gradients())

    def forward(adds: bool) -> Callable[..., tuple[Tensor, ...]]:
        """Return the forward. adds: the inputs are x and a residual; their sum is returned after the normalised
        tensor, and saved in place of x."""
        tensors = ("x", "residual") if adds else ("x",)
        num_results = len(tensors)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*inputs[: 1 - adds], *output[1:], inputs[num_results])
            ctx.mark_non_differentiable(*output[num_results:])

        def differentiate(ctx: Any, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
            dx, *gradients = backward(dy, *ctx.saved_tensors, *others[: int(adds)])
            return *[dx] * num_results, *gradients, None

        @opaque(
            schema(
                "_add" if adds else "",
                (*tensors, *parameters),
                "float epsilon",
                f"({', '.join(['Tensor'] * (num_results + count))})",
            ),
            lambda x, *_: (*(result_of(x) for _ in tensors), *(statistic_of(x) for _ in parameters)),
            keep,
            differentiate,
        )
        def run(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
            return launch(op, x, others[0] if adds else None, others[int(adds) : -1], others[-1])

        return run

    return Implementation(
        forward=forward(adds=False),
        add_forward=forward(adds=True),
        input_gradient=input_gradient,
        weight_gradient=lambda *given: tuple(weight_gradients(*given)),
        backward=backward,
    )
