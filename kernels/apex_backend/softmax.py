"""Causal softmax by apex (from Megatron-LM): of the reference's arguments, those without a mask and a window.

apex's softmax with a mask is not used: no run has one, it gives a hidden key the score -10,000 instead of no weight,
and builds differ in rows that see no key. A row whose visible scores are all minus infinity is NaN here, as in torch,
and not 0.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import CAUSAL_SOFTMAX_BACKWARD, CAUSAL_SOFTMAX_FORWARD, why_unsupported
from megapipe.kernels.cuda_backend.norms import result_of
from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.softmax import check
from megapipe.kernels.registry import KernelError

_LONGEST = 16_384
"""Since apex's commit 61aa24688; builds from before it end with an error of their own above 2,048."""


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take scores of this dtype. `forward` has rules for the other axes."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return why_unsupported([CAUSAL_SOFTMAX_FORWARD, CAUSAL_SOFTMAX_BACKWARD])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[2]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (weights,) = ctx.saved_tensors
    return input_gradient(dy, weights, ctx.scale), None, None, None, None


@opaque(
    "softmax_apex(Tensor scores, Tensor? mask, float scale, bool causal, int? window) -> Tensor",
    lambda scores, mask, scale, causal, window: result_of(scores),
    _keep,
    _backward,
)
def forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Attention weights of scores [b, heads, s, s], in their shape and dtype: softmax(scale * scores) over the keys.

    mask: None. causal: True. window: None, or at least s. Raises KernelError for other arguments and for sizes that
    apex's kernel does not take.
    """
    check(scores, mask, causal, window)
    length = scores.shape[-1]
    if mask is not None or not causal or (window is not None and window < length) or scores.shape[-2] != length:
        raise _unsupported("a mask, a sliding window, or attention that is not causal over one sequence")
    rows = 8 if length <= 128 else 4  # rows of scores that one block of apex's kernel takes
    sizes_fit = length % 4 == 0 and 16 < length <= _LONGEST and scores.numel() < 2**31  # it counts in 32 bits
    if not sizes_fit or scores.shape[:2].numel() % rows:
        raise _unsupported(
            f"{list(scores.shape)} scores: the sequence must be a multiple of 4 between 20 and {_LONGEST:,}, samples "
            f"times heads a multiple of {rows}, and all together less than 2^31"
        )
    y: Tensor = CAUSAL_SOFTMAX_FORWARD(_aligned(scores).view(-1, length, length), scale)
    return y.view(scores.shape)


@opaque(
    "softmax_apex_input_gradient(Tensor dy, Tensor y, float scale) -> Tensor",
    lambda dy, y, scale: result_of(y),
)
def input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Gradient of the scores, from that of the weights and the weights y."""
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
