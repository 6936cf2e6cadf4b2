"""Kernels of NVIDIA's apex: the functions and arguments of the references.

Norms: apex cannot split a backward, so each half computes both results and drops one.

Causal softmax (from Megatron-LM): the reference's arguments, without a mask and a window. apex's softmax with a mask
is not used: no run needs it, it gives hidden keys the score -10,000 instead of zero weight, and builds differ in rows
that see no key. A row whose visible scores are all minus infinity is NaN here, as in torch, and not 0.

AdamW: among apex's Adam kernels, this uses the one for CUDA graphs: step, learning rate, gradient scale
and skip flag are on the device, so that nothing waits for the host. It overwrites the gradient with the scaled one.
It supports only fp32 moments of an fp32 master: bf16 moments are widened before it and rounded after it, in temporary
buffers.

Gradient norm: every block of 65,536 elements is a tensor of apex's list, so that the sum has the canonical blocks.
The host prepares the list, about a microsecond for each block.

Weight gradient: cuBLAS adds the product to the accumulator in fp32. The product is never rounded to bf16 or fp16 or
written to memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import (
    ADAM,
    CAUSAL_SOFTMAX_BACKWARD,
    CAUSAL_SOFTMAX_FORWARD,
    L2_NORM,
    LAYER_NORM_BACKWARD,
    LAYER_NORM_FORWARD,
    RMS_NORM_BACKWARD,
    RMS_NORM_FORWARD,
    WEIGHT_GRADIENT,
    Function,
    why_unsupported,
)
from megapipe.kernels.cuda_backend.kernels import operands
from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.attention import softmax_operators
from megapipe.kernels.reference.norms import norm_functions, result_of, statistic_of
from megapipe.kernels.reference.optimizer import BLOCK, Buffers, Coefficients, adamw_operator
from megapipe.kernels.registry import FLOATS, KernelError, refusal, refused_dtype, refused_master


def _norm_forward(
    op: str, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    total = [] if residual is None else [x + residual]
    x = total[0] if total else x
    x, *others = operands(op, x, {}, dict(zip(("weight", "bias"), parameters, strict=False)))
    if not x.numel():  # apex would launch no blocks, which CUDA refuses
        return result_of(x), *total, *(statistic_of(x) for _ in parameters)
    function = LAYER_NORM_FORWARD if op == "layer_norm" else RMS_NORM_FORWARD
    y, *statistics = function(x, x.shape[-1:], *others, epsilon)
    return y, *total, *(statistic.view(*x.shape[:-1], 1) for statistic in statistics)


@dataclass(frozen=True)
class ApexNormBackward:
    """Operands of a norm's gradients, checked. apex cannot split a backward, so each half drops a result."""

    op: str
    dy: Tensor
    x: Tensor
    statistics: tuple[Tensor, ...]
    weight: Tensor
    dx: Tensor | None

    @classmethod
    def of(
        cls, op: str, dy: Tensor, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, dx: Tensor | None
    ) -> "ApexNormBackward":
        """Return the checked operands. Raises ValueError if a shape or dtype does not match x."""
        x, dy, weight = operands(op, x, {"dy": dy}, {"weight": weight})
        return cls(op, dy, x, tuple(statistic.float().flatten() for statistic in statistics), weight, dx)

    def input_gradient(self) -> Tensor:
        """Return the gradient of x, including dx."""
        return self.gradients()[0]

    def weight_gradients(self) -> list[Tensor]:
        """Return the gradients of weight and, for layer_norm, bias."""
        return self._gradients()[1:]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of x, including dx, of weight and, for layer_norm, of bias."""
        through, *others = self._gradients()
        return [through if self.dx is None else through + self.dx, *others]

    def _gradients(self) -> list[Tensor]:
        if not self.x.numel():
            return [result_of(self.x), *(torch.zeros_like(self.weight) for _ in self.statistics)]
        shape = self.x.shape[-1:]
        # Bias, epsilon and the last flag matter only to builds that can recompute x from the result; not asked here.
        if self.op == "layer_norm":
            weights = (self.weight, self.weight)
            return list(LAYER_NORM_BACKWARD(self.dy, *self.statistics, self.x, shape, *weights, 0.0, False))
        return list(RMS_NORM_BACKWARD(self.dy, *self.statistics, self.x, shape, self.weight, 0.0, False))


layer_norm = norm_functions("layer_norm", "apex", _norm_forward, ApexNormBackward.of)
rms_norm = norm_functions("rms_norm", "apex", _norm_forward, ApexNormBackward.of)


_MOST_KEYS = 16_384
"""Maximum number of keys since apex's commit 61aa24688; earlier builds raise their own error above 2,048."""


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Return the attention weights. Raises KernelError for a mask, for attention that is not causal or has a window,
    and for sizes that apex does not support."""
    length = scores.shape[-1]
    if mask is not None or not causal or (window is not None and window < length) or scores.shape[-2] != length:
        raise _unsupported("a mask, a sliding window, or attention that is not causal over one sequence")
    rows = 8 if length <= 128 else 4  # rows of scores that one block of apex's kernel takes
    sizes_fit = length % 4 == 0 and 16 < length <= _MOST_KEYS and scores.numel() < 2**31  # it counts in 32 bits
    if not sizes_fit or scores.shape[:2].numel() % rows:
        raise _unsupported(
            f"{list(scores.shape)} scores: the sequence must be a multiple of 4 between 20 and {_MOST_KEYS:,}, "
            f"samples times heads a multiple of {rows}, and all together less than 2^31"
        )
    y: Tensor = CAUSAL_SOFTMAX_FORWARD(_aligned(scores).view(-1, length, length), scale)
    return y.view(scores.shape)


def _softmax_input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    length = y.shape[-1]
    # apex writes its result over its first argument, which autograd may still need.
    own = dy.clone(memory_format=torch.contiguous_format).view(-1, length, length)
    dscores: Tensor = CAUSAL_SOFTMAX_BACKWARD(own, _aligned(y).view(-1, length, length), scale)
    return dscores.view(y.shape)


def _aligned(x: Tensor) -> Tensor:
    """Return x, contiguous and at a multiple of 8 bytes: apex reads four numbers at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 8 == 0 else x.clone()


def _unsupported(what: str) -> KernelError:
    return KernelError(f"apex's causal softmax does not support {what}; remove apex from kernels.backends")


softmax, attention_probabilities = softmax_operators("apex", _softmax, _softmax_input_gradient)


_CHUNK = 65_536
_ADAMW_LONGEST = 2**30
"""Elements of one tensor of a list; apex counts them in 32 bits."""
_DECOUPLED_DECAY, _CORRECT_BIAS = 1, 1


def _adamw(buffers: Buffers, coefficients: Coefficients) -> None:
    master, gradient, first, second, parameter, gradient_scale, skip = buffers
    moments = [first.float(), second.float()]
    skipped = master.new_zeros(1, dtype=torch.int32) if skip is None else (skip != 0).int().reshape(1)
    ADAM(
        _CHUNK,
        skipped,
        [list(tensor.split(_ADAMW_LONGEST)) for tensor in (gradient, master, *moments)],
        master.new_full((1,), coefficients.learning_rate),
        coefficients.beta1,
        coefficients.beta2,
        coefficients.epsilon,
        master.new_full((1,), coefficients.step, dtype=torch.int32),
        _DECOUPLED_DECAY,
        _CORRECT_BIAS,
        coefficients.weight_decay,
        master.new_ones(1) if gradient_scale is None else gradient_scale.reshape(1),
    )
    if first.dtype != torch.float32:
        first.copy_(moments[0])
        second.copy_(moments[1])
    if parameter is not None:
        rounded = master.to(parameter.dtype)
        parameter.copy_(rounded if skip is None else torch.where(skipped != 0, parameter, rounded))


adamw_step = adamw_operator(_adamw)


@opaque(
    "gradient_norm_apex(Tensor values) -> Tensor",
    lambda values: values.new_empty((), dtype=torch.float64),
)
def gradient_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor, block by block, as a 0-dim float64 tensor on its device.

    It is finite only if every element is; elements beyond 1e17 may overflow too, because the norm of a block is
    computed in fp32.
    """
    if not values.numel():
        return values.new_zeros((), dtype=torch.float64)
    blocks = list(values.contiguous().split(BLOCK))
    _, norms = L2_NORM(BLOCK, values.new_zeros(1, dtype=torch.int32), [blocks], True)
    total: Tensor = norms.double().square().sum()
    return total


_MOST = 2**31


def weight_gradient(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """Add the weight gradient to total [out, in] fp32, for input x [..., in] and output gradient dy [..., out].

    Raises ValueError for operands that apex would misread: it checks neither dtypes nor shapes.
    """
    rows, outputs = x.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous()
    fits = len(rows) == len(outputs) and total.shape == (outputs.shape[1], rows.shape[1]) and len(rows) < _MOST
    if not fits or x.dtype != dy.dtype or total.dtype != torch.float32 or not total.is_contiguous():
        raise ValueError(
            f"weight_gradient: x is {x.dtype} {list(x.shape)}, dy {dy.dtype} {list(dy.shape)}, total {total.dtype} "
            f"{list(total.shape)}; apex needs x and dy of one dtype with the same rows, and a contiguous float32 "
            "total"
        )
    if len(rows):
        WEIGHT_GRADIENT(rows, outputs, total)


Rule = Callable[[str, torch.dtype, int], str | None]


def _rule(refused: Rule, *functions: Function) -> Rule:
    """Return the rule of an op that calls these functions of apex. It also refuses a build whose functions have other
    arguments."""
    return lambda device, dtype, width: refused(device, dtype, width) or why_unsupported(functions)


def _halves(device: str, dtype: torch.dtype, width: int) -> str | None:
    return refused_dtype(dtype, torch.bfloat16, torch.float16)


def _floats(device: str, dtype: torch.dtype, width: int) -> str | None:
    return refused_dtype(dtype, *FLOATS)


REFUSALS = {
    "layer_norm": _rule(refusal, LAYER_NORM_FORWARD, LAYER_NORM_BACKWARD),
    "rms_norm": _rule(refusal, RMS_NORM_FORWARD, RMS_NORM_BACKWARD),
    "softmax": _rule(_halves, CAUSAL_SOFTMAX_FORWARD, CAUSAL_SOFTMAX_BACKWARD),
    "attention_probabilities": _rule(_halves, CAUSAL_SOFTMAX_FORWARD, CAUSAL_SOFTMAX_BACKWARD),
    "adamw": _rule(refused_master, ADAM),
    "gradient_norm": _rule(_floats, L2_NORM),
    "weight_gradient": _rule(_floats, WEIGHT_GRADIENT),
}
"""Op -> why the backend refuses a tensor, or None; `softmax` has further rules for axes of the scores."""
