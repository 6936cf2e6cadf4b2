"""Kernels in CUDA C++, with the functions and arguments of the references, on top of the library of csrc/.

Norms: statistics are fp32. Any width; x, its gradients and the weight share one dtype.

Softmax of attention scores: fp32 throughout, rounded once. Any number of keys. Rows stay on chip between the passes
over them, in one block up to 32,768 keys forward and 16,384 backward (half as many in fp32), 8,192 and 4,096 if rows
are not aligned to 16 bytes; GPUs with clusters (compute capability 9.0 and above) hold eight times as many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def operands(name: str, x: Tensor, beside: dict[str, Tensor | None], parameters: dict[str, Tensor]) -> list[Tensor]:
    """Return x, the tensors `beside`, which have its shape, and parameters of its width, contiguous and in this order,
    without absent ones.

    Raises ValueError, naming the tensor, if a shape or dtype differs.
    """
    expected = {key: (tensor, x.shape) for key, tensor in beside.items() if tensor is not None}
    expected |= {key: (tensor, x.shape[-1:]) for key, tensor in parameters.items()}
    for key, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name}: {key} is {tensor.dtype} {list(tensor.shape)}, but x is {x.dtype} {list(x.shape)}; it must "
                f"be {x.dtype} {list(shape)}; cast it, or request the backend 'reference', which supports all "
                "dtypes"
            )
    return [x.contiguous(), *(tensor.contiguous() for tensor, _ in expected.values())]


@dataclass(frozen=True)
class CudaNormBackward:
    """Operands of a norm's gradients, checked.

    op: `layer_norm` or `rms_norm`. statistics: mean (of layer_norm) and reciprocal deviation. dx: the part of the
    gradient of x that does not come through the norm, or None.
    """

    op: str
    dy: Tensor
    x: Tensor
    statistics: tuple[Tensor, ...]
    weight: Tensor
    dx: Tensor | None

    @classmethod
    def of(
        cls, op: str, dy: Tensor, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, dx: Tensor | None = None
    ) -> "CudaNormBackward":
        """Return the checked operands. Raises ValueError if a shape or dtype does not match x."""
        x, dy, *rest = operands(op, x, {"dy": dy, "dx": dx}, {"weight": weight})
        # torch.compile narrows the statistics to the dtype of x.
        wide = tuple(statistic.float().contiguous() for statistic in statistics)
        return cls(op, dy, x, wide, rest[-1], rest[0] if dx is not None else None)

    def input_gradient(self) -> Tensor:
        """Return the gradient of x, including dx."""
        dx = torch.empty_like(self.x)
        self._launch(dx, None, [None for _ in self.statistics])
        return dx

    def weight_gradients(self) -> list[Tensor]:
        """Return the gradients of weight and, for layer_norm, bias."""
        return self._with_weights(None)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of x, including dx, of weight and, for layer_norm, of bias, in one pass, with the bits
        of both halves."""
        dx = torch.empty_like(self.x)
        return [dx, *self._with_weights(dx)]

    def _with_weights(self, dx: Tensor | None) -> list[Tensor]:
        slabs = library.current().norm_slabs(*sizes(self.x)[:2])
        gradients = [torch.empty_like(self.weight) for _ in self.statistics]
        self._launch(dx, self.x.new_empty(len(gradients), slabs, self.x.shape[-1], dtype=torch.float32), gradients)
        return gradients

    def _launch(self, dx: Tensor | None, partial: Tensor | None, gradients: Sequence[Tensor | None]) -> None:
        tensors = (self.dy, self.x, *self.statistics, self.weight, self.dx, dx, partial, *gradients)
        library.current().launch(f"{self.op}_backward", *tensors, *sizes(self.x))


def _norm_forward(
    op: str, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    named = dict(zip(("weight", "bias"), parameters, strict=False))
    x, *others = operands(op, x, {"residual": residual}, named)
    y, total = result_of(x), None if residual is None else result_of(x)
    statistics = [statistic_of(x) for _ in parameters]
    rows, width, dtype = sizes(x)
    tensors = (x, *([None] if residual is None else []), *others, y, total, *statistics)
    library.current().launch(f"{op}_forward", *tensors, rows, width, epsilon, dtype)
    return tuple(tensor for tensor in (y, total, *statistics) if tensor is not None)


layer_norm = norm_functions("layer_norm", "cuda", _norm_forward, CudaNormBackward.of)
rms_norm = norm_functions("rms_norm", "cuda", _norm_forward, CudaNormBackward.of)


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
    library.current().launch(
        "adamw",
        *flat,
        buffers.master.numel(),
        coefficients.decay,
        coefficients.beta2,
        1 - coefficients.beta1,
        1 - coefficients.beta2,
        coefficients.step_size,
        coefficients.root_correction,
        coefficients.epsilon,
        gradient_scale,
        skip,
        int(buffers.first.dtype == torch.bfloat16),
    )


adamw_step = adamw_operator(_adamw)

REFUSALS = {"adamw": refused_master}
