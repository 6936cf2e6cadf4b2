"""Root-mean-square normalisation in CUDA C++: the functions and arguments of `megapipe.kernels.reference.rms_norm`.

Statistics are fp32. Any width; x, its gradients and the weight share one dtype.
"""

from typing import Any

from torch import Tensor

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.cuda_backend.library import refusal as refusal
from megapipe.kernels.cuda_backend.norms import Backward, operands, result_of, sizes, statistic_of
from megapipe.kernels.opaque import opaque


def _fake_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return result_of(x), statistic_of(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, rstd, weight)
    ctx.mark_non_differentiable(rstd)


def _forward_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, rstd, weight = ctx.saved_tensors
    return *backward(dy, x, rstd, weight), None


@opaque(
    "rms_norm_cuda(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    _fake_forward,
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, reciprocal root of the mean square [..., 1])."""
    x, weight = operands("rms_norm", x, {}, {"weight": weight})
    y, rstd = result_of(x), statistic_of(x)
    rows, width, dtype = sizes(x)
    library.current().launch("rms_norm_forward", x, None, weight, y, None, rstd, rows, width, epsilon, dtype)
    return y, rstd


def _fake_add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return result_of(x), result_of(x), statistic_of(x)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, rstd = output
    ctx.save_for_backward(total, rstd, inputs[2])
    ctx.mark_non_differentiable(rstd)


def _add_forward_backward(ctx: Any, dy: Tensor, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    total, rstd, weight = ctx.saved_tensors
    dx, dweight = backward(dy, total, rstd, weight, dtotal)
    return dx, dx, dweight, None


@opaque(
    "rms_norm_cuda_add(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor, Tensor)",
    _fake_add_forward,
    _keep_sum,
    _add_forward_backward,
)
def add_forward(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; reciprocal root of the sum's mean square)."""
    x, residual, weight = operands("rms_norm", x, {"residual": residual}, {"weight": weight})
    y, total, rstd = result_of(x), result_of(x), statistic_of(x)
    rows, width, dtype = sizes(x)
    library.current().launch("rms_norm_forward", x, residual, weight, y, total, rstd, rows, width, epsilon, dtype)
    return y, total, rstd


@opaque(
    "rms_norm_cuda_input_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor weight, Tensor? dx=None) -> Tensor",
    lambda dy, x, rstd, weight, dx=None: result_of(x),
)
def input_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return Backward.of("rms_norm", dy, x, (rstd,), weight, dx).input_gradient()


@opaque(
    "rms_norm_cuda_weight_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor weight) -> Tensor",
    lambda dy, x, rstd, weight: result_of(weight),
)
def _weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    (dweight,) = Backward.of("rms_norm", dy, x, (rstd,), weight).weight_gradients()
    return dweight


def weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Gradient of weight [h], summed over all other axes in fp32, in the weight's dtype."""
    return (_weight_gradient(dy, x, rstd, weight),)


@opaque(
    "rms_norm_cuda_backward(Tensor dy, Tensor x, Tensor rstd, Tensor weight, Tensor? dx=None) -> (Tensor, Tensor)",
    lambda dy, x, rstd, weight, dx=None: (result_of(x), result_of(weight)),
)
def backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight: the bits of `input_gradient` and `weight_gradient`, in one pass."""
    through, dweight = Backward.of("rms_norm", dy, x, (rstd,), weight, dx).gradients()
    return through, dweight
