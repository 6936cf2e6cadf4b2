"""Kernels in CUDA C++, with the functions and arguments of the references, on top of the library of csrc/.

Norms: statistics are fp32. Any width; x, its gradients and the weight share one dtype.

Softmax of attention scores: fp32 throughout, rounded once. Any number of keys. Rows stay on chip between the passes
over them, in one block up to 32,768 keys forward and 16,384 backward (half as many in fp32), 8,192 and 4,096 if rows
are not aligned to 16 bytes; GPUs with clusters (compute capability 9.0 and above) hold eight times as many.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.reference.attention import softmax_operators
from megapipe.kernels.reference.norms import norm_functions, result_of, statistic_of
from megapipe.kernels.reference.optimizer import Buffers, Coefficients, adamw_operator
from megapipe.kernels.registry import refusal as refusal
from megapipe.kernels.registry import refused_master


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Return rows, width, and the number of the dtype, as csrc takes them."""
    width = x.shape[-1]
    return x.numel() // width if width else 0, width, library.DTYPES[x.dtype]


def operands(name: str, x: Tensor, matching: dict[str, Tensor | None], parameters: dict[str, Tensor]) -> list[Tensor]:
    """Return x, the `matching` tensors, which have its shape, and parameters of its width, contiguous and in this
    order, without absent ones.

    Raises ValueError, naming the tensor, if a shape or dtype differs.
    """
    expected = {key: (each, x.shape) for key, each in matching.items() if each is not None}
    expected |= {key: (each, x.shape[-1:]) for key, each in parameters.items()}
    for key, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name}: {key} is {tensor.dtype} {list(tensor.shape)}, "
                f"but x is {x.dtype} {list(x.shape)}; it must be {x.dtype} {list(shape)}; "
                "cast it, or request the backend 'reference', which supports all dtypes"
            )
    return [x.contiguous(), *(tensor.contiguous() for tensor, _ in expected.values())]


def _norm_gradients(
    op: str,
    dy: Tensor,
    x: Tensor,
    statistics: Sequence[Tensor],
    weight: Tensor,
    dx_residual: Tensor | None,
    of_x: bool,
    of_parameters: bool,
) -> list[Tensor]:
    """Return gradients in one pass. Raises ValueError if a shape or dtype does not match x."""
    x, dy, *residual, weight = operands(op, x, {"dy": dy, "dx": dx_residual}, {"weight": weight})
    # torch.compile narrows the statistics to the dtype of x.
    wide = [statistic.float().contiguous() for statistic in statistics]
    dx, partial = torch.empty_like(x) if of_x else None, None
    gradients: list[Tensor | None] = [None for _ in wide]
    if of_parameters:
        slabs = library.current().norm_slabs(*sizes(x)[:2])
        partial = x.new_empty(len(wide), slabs, x.shape[-1], dtype=torch.float32)
        gradients = [torch.empty_like(weight) for _ in wide]
    tensors = (dy, x, *wide, weight, *(residual or (None,)), dx, partial, *gradients)
    library.current().launch(f"{op}_backward", *tensors, *sizes(x))
    return [gradient for gradient in (dx, *gradients) if gradient is not None]


def _norm_forward(
    op: str, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    named = dict(zip(("weight", "bias"), parameters, strict=False))
    x, *contiguous = operands(op, x, {"residual": residual}, named)
    y, total = result_of(x), None if residual is None else result_of(x)
    statistics = [statistic_of(x) for _ in parameters]
    rows, width, dtype = sizes(x)
    tensors = (x, *([None] if residual is None else []), *contiguous, y, total, *statistics)
    library.current().launch(f"{op}_forward", *tensors, rows, width, epsilon, dtype)
    return tuple(tensor for tensor in (y, total, *statistics) if tensor is not None)


layer_norm = norm_functions("layer_norm", "cuda", _norm_forward, _norm_gradients)
rms_norm = norm_functions("rms_norm", "cuda", _norm_forward, _norm_gradients)


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    scores = scores.contiguous()
    weights = result_of(scores)
    mask, strides = _spread(mask, scores)
    seen = 0 if not causal else scores.shape[-1] if window is None else window
    dtype = library.DTYPES[scores.dtype]
    library.current().launch("softmax_forward", scores, mask, weights, *scores.shape, scale, *strides, seen, dtype)
    return weights


def _softmax_input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores. Raises ValueError if dy and y differ in shape or dtype."""
    if dy.shape != y.shape or dy.dtype != y.dtype:
        raise ValueError(f"dy is {dy.dtype} {list(dy.shape)} and y {y.dtype} {list(y.shape)}; they must be alike")
    dy, y = dy.contiguous(), y.contiguous()
    dscores = result_of(y)
    rows, width, dtype = sizes(y)
    library.current().launch("softmax_input_gradient", dy, y, dscores, rows, width, scale, dtype)
    return dscores


softmax, attention_probabilities = softmax_operators("cuda", _softmax, _softmax_input_gradient)


def _spread(mask: Tensor | None, scores: Tensor) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Return the mask with contiguous keys, and its strides along batch, heads and queries, which are 0 for broadcast
    axes."""
    if mask is None:
        return None, (0, 0, 0)
    mask = mask.reshape((1,) * (scores.dim() - mask.dim()) + mask.shape)
    mask = mask.expand(*mask.shape[:-1], scores.shape[-1]).contiguous()
    batch, head, query, _ = mask.expand(scores.shape).stride()
    return mask, (batch, head, query)


def _adamw(buffers: Buffers, coefficients: Coefficients) -> None:
    *flat, gradient_scale, skip = buffers
    numbers = buffers.master.numel(), *coefficients.of_kernels()
    half = int(buffers.first.dtype == torch.bfloat16)
    library.current().launch("adamw", *flat, *numbers, gradient_scale, skip, half)


adamw_step = adamw_operator(_adamw)

REFUSALS = {"adamw": refused_master}
