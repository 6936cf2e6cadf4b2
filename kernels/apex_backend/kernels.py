"""Kernels of NVIDIA's apex: the functions and arguments of the references.

A table has the functions of apex that megapipe calls, with the arguments of every supported build. apex has no version
numbers: a form is identified by a commit of github.com/NVIDIA/apex, or of a fork, that has it, and by the change that
introduced it. pybind11 checks arguments only when a function is called, and some are first called in the backward of
the first step, so a build is compared with this table when a backend is chosen (`why_unsupported`).

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

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.cuda_backend.kernels import operands
from megapipe.kernels.reference.attention import softmax_operators
from megapipe.kernels.reference.norms import norm_functions, result_of, statistic_of
from megapipe.kernels.reference.optimizer import BLOCK, Buffers, Coefficients, adamw_operator
from megapipe.kernels.registry import FLOATS, KernelError, opaque, refusal, refused_dtype, refused_master

_ARGUMENT = re.compile(r"[(,] *(?:arg\d+|\w+): ")


@dataclass(frozen=True)
class Form:
    """The arguments of a function, in order, as `name:kind`.

    commit: a commit whose sources have them. since: what introduced them: a pull request and its month, or a year.
    """

    commit: str
    since: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A function of one of apex's extensions. forms: each has the arguments of the one before it, and one more."""

    extension: str
    name: str
    forms: tuple[Form, ...]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with the leading arguments that the installed build takes, on the device of the first
        tensor.

        Raises ImportError without the extension, and ValueError if the build is not in the table.
        """
        function = getattr(importlib.import_module(self.extension), self.name)
        count = _count(function)
        if count not in self.counts:
            raise ValueError(f"apex: {self.flaw()}")
        device = next(tensor.device for tensor in _tensors(arguments))
        if device.type != "cuda":
            return function(*arguments[:count])
        with torch.cuda.device(device):
            return function(*arguments[:count])

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of arguments of the known forms."""
        return tuple(len(form.arguments) for form in self.forms)

    def flaw(self) -> str | None:
        """Return why the installed extension cannot be called; None if it can. Raises ImportError."""
        function = getattr(importlib.import_module(self.extension), self.name, None)
        if function is None:
            return f"{self.extension} has no function {self.name}; build an apex that has it ({self.forms[0].since})"
        if _count(function) in self.counts:
            return None
        supported, taken = " or ".join(map(str, self.counts)), _count(function) or "unknown"
        return (
            f"{self.extension}.{self.name} takes {taken} arguments instead of {supported}; "
            f"build apex at commit {self.forms[-1].commit[:9]}"
        )


def why_unsupported(functions: Iterable[Function]) -> str | None:
    """Return why the installed build cannot run these functions; None if it can. Raises ImportError."""
    return next(filter(None, (function.flaw() for function in functions)), None)


@functools.cache
def _count(function: Callable[..., Any]) -> int:
    """Return the number of arguments in pybind11's docstring, `name(arg0: type, ...) -> type`; 0 if it does not list
    them."""
    signature = (function.__doc__ or "").partition(" -> ")[0].partition("\n")[0]
    return len(_ARGUMENT.findall(signature))


def _tensors(arguments: Iterable[Any]) -> Iterable[Tensor]:
    return (argument for argument in arguments if isinstance(argument, Tensor))


def _function(extension: str, name: str, *forms: tuple[tuple[str, str], str]) -> Function:
    """Return a function, and add it to `FUNCTIONS`. forms: for each its source (commit, since), and the arguments that
    it adds to the previous form."""
    arguments: tuple[str, ...] = ()
    forms_so_far = []
    for source, more in forms:
        arguments += tuple(more.split())
        forms_so_far.append(Form(*source, arguments))
    FUNCTIONS.append(Function(extension, name, tuple(forms_so_far)))
    return FUNCTIONS[-1]


FUNCTIONS: list[Function] = []
"""Every function of the table."""

_LAYER_NORM = ("adee29f690e1fe2d45449f179ae2b6d17e497dfe", "2019")
_RMS_NORM = ("028ef04cb7a5ca79a5c2929fb4416209c27555ac", "pull request 1274, January 2022")
_MEMORY_EFFICIENT = ("6ff45486f432f91eb86937a0def5eb5f2cf792ae", "pull request 1715, August 2023")
_AMP = ("9082484be7ee36f12c300b2bd56cc427b9c70e2c", "2019")
_CAPTURABLE = ("6bd01c4b99a84648ad5e5238a959735e6936c813", "pull request 1560, January 2023")
"""An Adam for CUDA graphs: its step, rate, scale and skip flag are on the device."""
_FUSION = ("23c1f86520e22b505e8fdfcf6298273dff2d93d8", "pull request 1297, February 2022")
_SOFTMAX = ("23c1f86520e22b505e8fdfcf6298273dff2d93d8", "2021")

LAYER_NORM_FORWARD = _function(
    "fused_layer_norm_cuda",
    "forward_affine",
    (_LAYER_NORM, "input:tensor normalized_shape:shape gamma:tensor beta:tensor epsilon:float"),
)
LAYER_NORM_BACKWARD = _function(
    "fused_layer_norm_cuda",
    "backward_affine",
    (
        _LAYER_NORM,
        "dout:tensor mean:tensor invvar:tensor input:tensor normalized_shape:shape "
        "gamma:tensor beta:tensor epsilon:float",
    ),
    (_MEMORY_EFFICIENT, "memory_efficient:bool"),
)
RMS_NORM_FORWARD = _function(
    "fused_layer_norm_cuda",
    "rms_forward_affine",
    (_RMS_NORM, "input:tensor normalized_shape:shape gamma:tensor epsilon:float"),
)
RMS_NORM_BACKWARD = _function(
    "fused_layer_norm_cuda",
    "rms_backward_affine",
    (_RMS_NORM, "dout:tensor invvar:tensor input:tensor normalized_shape:shape gamma:tensor epsilon:float"),
    (_MEMORY_EFFICIENT, "memory_efficient:bool"),
)
L2_NORM = _function(
    "amp_C",
    "multi_tensor_l2norm",
    (_AMP, "chunk_size:int noop_flag:tensor tensor_lists:lists per_tensor:bool"),
)
ADAM = _function(
    "amp_C",
    "multi_tensor_adam_capturable",
    (
        _CAPTURABLE,
        "chunk_size:int noop_flag:tensor tensor_lists:lists lr:tensor beta1:float beta2:float epsilon:float "
        "step:tensor mode:int bias_correction:int weight_decay:float inv_scale:tensor",
    ),
)
CAUSAL_SOFTMAX_FORWARD = _function(
    "scaled_upper_triang_masked_softmax_cuda", "forward", (_SOFTMAX, "input:tensor scale_factor:float")
)
CAUSAL_SOFTMAX_BACKWARD = _function(
    "scaled_upper_triang_masked_softmax_cuda",
    "backward",
    (_SOFTMAX, "output_grads:tensor softmax_results:tensor scale_factor:float"),
)
WEIGHT_GRADIENT = _function(
    "fused_weight_gradient_mlp_cuda",
    "wgrad_gemm_accum_fp32",
    (_FUSION, "input:tensor d_output:tensor d_weight:tensor"),
)


def _norm_forward(
    op: str, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    total = [] if residual is None else [x + residual]
    x = total[0] if total else x
    x, *contiguous = operands(op, x, {}, dict(zip(("weight", "bias"), parameters, strict=False)))
    if not x.numel():  # apex would launch no blocks, which CUDA refuses
        return result_of(x), *total, *(statistic_of(x) for _ in parameters)
    function = LAYER_NORM_FORWARD if op == "layer_norm" else RMS_NORM_FORWARD
    y, *statistics = function(x, x.shape[-1:], *contiguous, epsilon)
    return y, *total, *(statistic.view(*x.shape[:-1], 1) for statistic in statistics)


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
    """Compute all gradients and return the wanted ones. Raises ValueError if a shape or dtype does not match x."""
    x, dy, weight = operands(op, x, {"dy": dy}, {"weight": weight})
    arguments = dy, *(statistic.float().flatten() for statistic in statistics), x, x.shape[-1:], weight
    # Bias, epsilon and the last flag matter only to builds that can recompute x from the result; not asked here.
    if not x.numel():
        dx, *gradients = result_of(x), *(torch.zeros_like(weight) for _ in statistics)
    elif op == "layer_norm":
        dx, *gradients = LAYER_NORM_BACKWARD(*arguments, weight, 0.0, False)
    else:
        dx, *gradients = RMS_NORM_BACKWARD(*arguments, 0.0, False)
    through = [dx if dx_residual is None else dx + dx_residual] if of_x else []
    return [*through, *(gradients if of_parameters else [])]


layer_norm = norm_functions("layer_norm", "apex", _norm_forward, _norm_gradients)
rms_norm = norm_functions("rms_norm", "apex", _norm_forward, _norm_gradients)


_MOST_KEYS = 16_384
"""Maximum number of keys since apex's commit 61aa24688; earlier builds raise their own error above 2,048."""


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Return the attention weights. Raises KernelError for a mask, for attention that is not causal or has a window,
    and for sizes that apex does not support."""
    length = scores.shape[-1]
    if mask is not None or not causal or (window is not None and window < length) or scores.shape[-2] != length:
        raise _unsupported("a mask, a sliding window, or attention that is not causal over one sequence")
    rows = 8 if length <= 128 else 4  # rows of scores that one block of apex's kernel takes
    # apex counts in 32 bits.
    sizes_fit = length % 4 == 0 and 16 < length <= _MOST_KEYS and scores.numel() < 2**31
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
    overwritten = dy.clone(memory_format=torch.contiguous_format).view(-1, length, length)
    dscores: Tensor = CAUSAL_SOFTMAX_BACKWARD(overwritten, _aligned(y).view(-1, length, length), scale)
    return dscores.view(y.shape)


def _aligned(x: Tensor) -> Tensor:
    """Return x, contiguous and at a multiple of 8 bytes: apex reads four numbers at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 8 == 0 else x.clone()


def _unsupported(what: str) -> KernelError:
    return KernelError(f"apex's causal softmax does not support {what}; remove apex from kernels.backends")


softmax, attention_probabilities = softmax_operators("apex", _softmax, _softmax_input_gradient)


_CHUNK = 65_536
"""Elements that one thread block of apex's kernels for lists processes."""
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
"""Numbers of rows must be below this one, because apex counts rows in 32 bits."""


def weight_gradient(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """Add the weight gradient to total [out, in] fp32, for input x [..., in] and output gradient dy [..., out].

    Raises ValueError for operands that apex would misread: it checks neither dtypes nor shapes.
    """
    rows, outputs = x.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous()
    fits = len(rows) == len(outputs) and total.shape == (outputs.shape[1], rows.shape[1]) and len(rows) < _MOST
    if not fits or x.dtype != dy.dtype or total.dtype != torch.float32 or not total.is_contiguous():
        raise ValueError(
            f"weight_gradient: x is {x.dtype} {list(x.shape)}, "
            f"dy {dy.dtype} {list(dy.shape)}, total {total.dtype} {list(total.shape)}; apex "
            "needs x and dy of one dtype with the same rows, and a contiguous float32 total"
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
