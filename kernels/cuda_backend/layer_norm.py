"""Layer normalisation in CUDA C++: the functions and arguments of `megapipe.kernels.reference.layer_norm`.

Statistics are fp32. Any width; x, its gradients and the weight share one dtype.
"""

from typing import Any

from torch import Tensor

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.cuda_backend.library import refusal as refusal
from megapipe.kernels.cuda_backend.norms import Backward, operands, result_of, sizes, statistic_of
from megapipe.kernels.opaque import opaque


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return result_of(x), statistic_of(x), statistic_of(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight)
    ctx.mark_non_differentiable(mean, rstd)


def _forward_backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, rstd, weight = ctx.saved_tensors
    return *backward(dy, x, mean, rstd, weight), None


@opaque(
    "layer_norm_cuda(Tensor x, Tensor weight, Tensor bias, float epsilon) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    _keep,
    _forward_backward,
)
def forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised [..., h] in x's dtype, mean [..., 1], reciprocal standard deviation [..., 1])."""
    x, weight, bias = operands("layer_norm", x, {}, {"weight": weight, "bias": bias})
    y, mean, rstd = result_of(x), statistic_of(x), statistic_of(x)
    rows, width, dtype = sizes(x)
    tensors = (x, None, weight, bias, y, None, mean, rstd)
    library.current().launch("layer_norm_forward", *tensors, rows, width, epsilon, dtype)
    return y, mean, rstd


def _fake_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return result_of(x), result_of(x), statistic_of(x), statistic_of(x)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, inputs[2])
    ctx.mark_non_differentiable(mean, rstd)


def _add_forward_backward(ctx: Any, dy: Tensor, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight = ctx.saved_tensors
    dx, *gradients = backward(dy, total, mean, rstd, weight, dtotal)
    return dx, dx, *gradients, None


@opaque(
    "layer_norm_cuda_add(Tensor x, Tensor residual, Tensor weight, Tensor bias, float epsilon) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_add_forward,
    _keep_sum,
    _add_forward_backward,
)
def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalised sum and sum of x and residual, in the dtype of x; mean and reciprocal deviation of the sum)."""
    x, residual, weight, bias = operands("layer_norm", x, {"residual": residual}, {"weight": weight, "bias": bias})
    y, total, mean, rstd = result_of(x), result_of(x), statistic_of(x), statistic_of(x)
    rows, width, dtype = sizes(x)
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    library.current().launch("layer_norm_forward", *tensors, rows, width, epsilon, dtype)
    return y, total, mean, rstd


@opaque(
    "layer_norm_cuda_input_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dx=None) "
    "-> Tensor",
    lambda dy, x, mean, rstd, weight, dx=None: result_of(x),
)
def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> Tensor:
    """Gradient of x [..., h], of which dx, if given, is the part that does not come through the norm."""
    return Backward.of("layer_norm", dy, x, (mean, rstd), weight, dx).input_gradient()


@opaque(
    "layer_norm_cuda_weight_gradient(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight) "
    "-> (Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight: (result_of(weight), result_of(weight)),
)
def weight_gradient(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias [h], summed over all other axes in fp32, in their dtype."""
    dweight, dbias = Backward.of("layer_norm", dy, x, (mean, rstd), weight).weight_gradients()
    return dweight, dbias


@opaque(
    "layer_norm_cuda_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dx=None) "
    "-> (Tensor, Tensor, Tensor)",
    lambda dy, x, mean, rstd, weight, dx=None: (result_of(x), result_of(weight), result_of(weight)),
)
def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias: the bits of `input_gradient` and `weight_gradient`, in one pass."""
    through, dweight, dbias = Backward.of("layer_norm", dy, x, (mean, rstd), weight, dx).gradients()
    return through, dweight, dbias
