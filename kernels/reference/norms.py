"""Norms of the last axis, in torch: layer normalisation, and root-mean-square normalisation (Zhang and Sennrich 2019,
1910.07467).

Statistics and products are fp32 (fp64 for fp64); the result is rounded to x's dtype once.

Other backends make the operators of their layer norm or rms norm from launches, by `norm_functions`. A layer norm has
the parameters weight and bias and the statistics mean and reciprocal deviation, an rms norm a weight and the
reciprocal root of the mean square: it has the same number of statistics and parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.registry import Implementation, opaque


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and products of x: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or fp64 for fp64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`."""
    return x if x.dtype == dtype else x.to(dtype)


_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised x [..., h] in x's dtype, mean [..., 1], and reciprocal standard deviation [..., 1]."""
    weight, bias = _statistics_dtype(x, weight), _statistics_dtype(x, bias)
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def layer_norm_input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> Tensor:
    """Return the gradient of x [..., h]. dx: the part of it that does not come through the norm, or None.

    After `add_forward`, x is the sum, dx the gradient of the sum, and the result the gradient of x and the residual.
    """
    weight = _statistics_dtype(x, weight)
    through = _layer_norm_backward(dy, x, x.shape[-1:], mean, rstd, weight, weight, [True, False, False])[0]
    return through if dx is None else through + dx


@opaque(
    "layer_norm_weight_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> (Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight: (torch.empty_like(weight), torch.empty_like(weight)),
)
def layer_norm_weight_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias [h], summed over all other axes, in their dtype."""
    wide = _statistics_dtype(x, weight)
    # torch.compile narrows the statistics to the dtype of x.
    mean, rstd = mean.to(wide.dtype), rstd.to(wide.dtype)
    _, dweight, dbias = _layer_norm_backward(dy, x, x.shape[-1:], mean, rstd, wide, wide, [False, True, True])
    return dweight.to(weight.dtype), dbias.to(weight.dtype)


def _statistics_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """Return the weight, in fp32 if needed: on the CPU, torch saves mean and deviation in its dtype, and bf16 would
    lose half of their digits."""
    return weight.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else weight


def rms_norm_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised x [..., h] in x's dtype, and the reciprocal root of the mean square [..., 1]."""
    x_wide = wide(x)
    rstd = torch.rsqrt(torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square() / x.shape[-1] + epsilon)
    return to_dtype(x_wide * rstd * weight, x.dtype), rstd


def rms_norm_input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """Return the gradient of x [..., h]. dx: the part of it that does not come through the norm, or None.

    After `add_forward`, x is the sum, dx the gradient of the sum, and the result the gradient of x and the residual.
    """
    normalised = wide(x) * rstd
    scaled = wide(dy) * weight
    mean = (scaled * normalised).mean(-1, keepdim=True)
    through = to_dtype((scaled - normalised * mean) * rstd, x.dtype)
    return through if dx is None else through + dx


def rms_norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Return the gradient of weight [h], summed over all other axes in fp32 (fp64), in the weight's dtype."""
    return (to_dtype(_rms_norm_weight_gradient(dy, x, rstd), weight.dtype),)


@opaque(
    "rms_norm_weight_gradient(Tensor dy, Tensor x, Tensor rstd) -> Tensor",
    lambda dy, x, rstd: rstd.new_empty(x.shape[-1]),
)
def _rms_norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    return (wide(x) * rstd).mul_(dy).flatten(0, -2).sum(0)


def _from_halves(
    forward: Callable[..., tuple[Tensor, ...]],
    input_gradient: Callable[..., Tensor],
    weight_gradient: Callable[..., tuple[Tensor, ...]],
    num_statistics: int,
) -> Implementation:
    """Return a norm from its forward and the two halves of its backward."""

    def add_forward(x: Tensor, residual: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        """Return the normalised sum, and the sum, of x and residual in the dtype of x; the statistics of the sum."""
        total = x + residual
        y, *statistics = forward(total, *operands)
        return y, total, *statistics

    def backward(dy: Tensor, x: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Return the gradients of x, weight and bias, with the bits of the halves. operands: of `input_gradient`."""
        dx = input_gradient(dy, x, *operands)
        return dx, *weight_gradient(dy, x, *operands[: num_statistics + 1])

    return Implementation(
        forward=forward,
        add_forward=add_forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        backward=backward,
    )


layer_norm = _from_halves(layer_norm_forward, layer_norm_input_gradient, layer_norm_weight_gradient, num_statistics=2)
rms_norm = _from_halves(rms_norm_forward, rms_norm_input_gradient, rms_norm_weight_gradient, num_statistics=1)


def unit_offset(norm: Implementation) -> Implementation:
    """Return an rms norm whose factor is 1 + weight, from one whose factor is the weight.

    The sum is fp32 (fp64 for fp64), and the norm takes a weight that is wider than x, so the result is rounded once:
    the formula of transformers' GemmaRMSNorm.
    """

    def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        return norm.forward(x, 1 + wide(weight), epsilon)

    def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        return norm.add_forward(x, residual, 1 + wide(weight), epsilon)

    def input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
        return norm.input_gradient(dy, x, rstd, 1 + wide(weight), dx)

    def weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (to_dtype(norm.weight_gradient(dy, x, rstd, wide(weight))[0], weight.dtype),)

    def backward(
        dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        through, dweight = norm.backward(dy, x, rstd, 1 + wide(weight), dx)
        return through, to_dtype(dweight, weight.dtype)

    return Implementation(
        forward=forward,
        add_forward=add_forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        backward=backward,
    )


def without_bias(norm: Implementation) -> Implementation:
    """Return a layer norm without a bias, from one with a bias, which is zero."""

    def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        return norm.forward(x, weight, torch.zeros_like(weight), epsilon)

    def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        return norm.add_forward(x, residual, weight, torch.zeros_like(weight), epsilon)

    def weight_gradient(dy: Tensor, *rest: Tensor) -> tuple[Tensor]:
        return (norm.weight_gradient(dy, *rest)[0],)

    def backward(dy: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
        dx, dweight, _ = norm.backward(dy, *rest)
        return dx, dweight

    return Implementation(
        forward=forward,
        add_forward=add_forward,
        input_gradient=norm.input_gradient,
        weight_gradient=weight_gradient,
        backward=backward,
    )


layer_norm_without_bias = without_bias(layer_norm)
rms_norm_unit_offset = unit_offset(rms_norm)


Forward = Callable[[str, Tensor, Tensor | None, Sequence[Tensor], float], tuple[Tensor, ...]]
"""(op, x, residual, parameters, epsilon) -> (normalised, the sum if there is a residual, statistics)."""

Gradients = Callable[[str, Tensor, Tensor, Sequence[Tensor], Tensor, Tensor | None, bool, bool], list[Tensor]]
"""(op, dy, x, statistics, weight, the part of dx that does not come through the norm, whether the gradient of x is
wanted, whether those of the parameters are) -> the wanted ones of the gradients of x, including that part, of weight
and, for a layer norm, of bias. A gradient has the same bits whether or not others are wanted."""


def statistic_of(x: Tensor) -> Tensor:
    """Allocate one fp32 number per row of x: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def result_of(x: Tensor) -> Tensor:
    """Allocate a contiguous result in x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def norm_functions(op: str, backend: str, launch: Forward, gradients: Gradients) -> Implementation:
    """Return the functions of `op`, with the arguments of `megapipe.kernels.reference.norms`, as operators.

    The gradients of weight and bias are sums over all axes but the last.
    """
    parameters = ("weight", "bias") if op == "layer_norm" else ("weight",)
    saved = ("dy", "x", *(("mean", "rstd") if op == "layer_norm" else ("rstd",)), "weight")
    count = len(parameters)  # of statistics too

    def schema(suffix: str, tensors: Sequence[str], last: str, result: str) -> str:
        arguments = ", ".join([*(f"Tensor {name}" for name in tensors), *([last] if last else [])])
        return f"{op}_{backend}{suffix}({arguments}) -> {result}"

    def gradients_of(dy: Tensor, x: Tensor, operands: Sequence[Any], of_x: bool, of_parameters: bool) -> list[Tensor]:
        """Return gradients. operands: statistics, weight and, if present, the part of dx that does not come through
        the norm."""
        *statistics, weight, dx = [*operands, None][: count + 2]
        return gradients(op, dy, x, statistics, weight, dx, of_x, of_parameters)

    @opaque(
        schema("_input_gradient", saved, "Tensor? dx=None", "Tensor"),
        lambda dy, x, *_: result_of(x),
    )
    def input_gradient(dy: Tensor, x: Tensor, *operands: Tensor | None) -> Tensor:
        return gradients_of(dy, x, operands, True, False)[0]

    @opaque(
        schema("_weight_gradient", saved, "", "Tensor[]"),
        lambda dy, x, *operands: [result_of(operands[-1]) for _ in parameters],
    )
    def weight_gradients(dy: Tensor, x: Tensor, *operands: Tensor) -> list[Tensor]:
        return gradients_of(dy, x, operands, False, True)

    @opaque(
        schema("_backward", saved, "Tensor? dx=None", "Tensor[]"),
        lambda dy, x, *operands: [result_of(x), *(result_of(operands[count]) for _ in parameters)],
    )
    def backward(dy: Tensor, x: Tensor, *operands: Tensor | None) -> list[Tensor]:
        return gradients_of(dy, x, operands, True, True)

    def forward(adds: bool) -> Callable[..., tuple[Tensor, ...]]:
        """Return the forward. adds: the inputs are x and a residual; their sum is returned after the normalised
        tensor, and saved in place of x."""
        tensors = ("x", "residual") if adds else ("x",)
        num_results = len(tensors)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*inputs[: 1 - adds], *output[1:], inputs[num_results])
            ctx.mark_non_differentiable(*output[num_results:])

        def differentiate(ctx: Any, dy: Tensor, *operands: Tensor) -> tuple[Tensor | None, ...]:
            dx, *gradients = backward(dy, *ctx.saved_tensors, *operands[: int(adds)])
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
        def run(x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
            return launch(op, x, operands[0] if adds else None, operands[int(adds) : -1], operands[-1])

        return run

    return Implementation(
        forward=forward(adds=False),
        add_forward=forward(adds=True),
        input_gradient=input_gradient,
        weight_gradient=lambda *arguments: tuple(weight_gradients(*arguments)),
        backward=backward,
    )
