"""Softmax of attention scores in CUDA C++: the functions and arguments of `megapipe.kernels.reference.softmax`.

fp32 throughout, rounded once. Any number of keys. Rows stay on chip between the passes over them, in one block up to
32,768 keys forward and 16,384 backward (half as many in fp32), 8,192 and 4,096 where rows are not aligned to 16 bytes;
GPUs with clusters (compute capability 9.0 and above) hold eight times as many.
"""

from typing import Any

from torch import Tensor

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.cuda_backend.library import refusal as refusal
from megapipe.kernels.cuda_backend.norms import result_of, sizes
from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.softmax import check


def _fake_forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    return result_of(scores)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[2]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (weights,) = ctx.saved_tensors
    return input_gradient(dy, weights, ctx.scale), None, None, None, None


@opaque(
    "softmax_cuda(Tensor scores, Tensor? mask, float scale, bool causal, int? window) -> Tensor",
    _fake_forward,
    _keep,
    _backward,
)
def forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Attention weights of scores [b, heads, q, k], in their shape and dtype: softmax(scale * scores) over the keys.

    A hidden key weighs 0, whatever its score; a row that sees no key, or only scores of minus infinity, is all 0.

    mask: bool, broadcasts to the scores' shape, True where a key is seen; [b, 1, 1, k] hides padding.
    causal: query i of q stands at position i + k - q and sees that position and those before it; window: at most so
    many of them, only with causal. Raises ValueError for arguments that break these rules.
    """
    check(scores, mask, causal, window)
    scores = scores.contiguous()
    weights = result_of(scores)
    mask, strides = _spread(mask, scores)
    seen = 0 if not causal else scores.shape[-1] if window is None else window
    dtype = library.DTYPES[scores.dtype]
    library.current().launch("softmax_forward", scores, mask, weights, *scores.shape, scale, *strides, seen, dtype)
    return weights


@opaque(
    "softmax_cuda_input_gradient(Tensor dy, Tensor y, float scale) -> Tensor",
    lambda dy, y, scale: result_of(y),
)
def input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Gradient of the scores, from that of the weights and the weights y. Raises ValueError when they differ."""
    if dy.shape != y.shape or dy.dtype != y.dtype:
        raise ValueError(f"dy is {dy.dtype} {list(dy.shape)} and y {y.dtype} {list(y.shape)}; they must be alike")
    dy, y = dy.contiguous(), y.contiguous()
    dscores = result_of(y)
    rows, width, dtype = sizes(y)
    library.current().launch("softmax_input_gradient", dy, y, dscores, rows, width, scale, dtype)
    return dscores


def _spread(mask: Tensor | None, scores: Tensor) -> tuple[Tensor | None, tuple[int, int, int]]:
    """The mask, its keys next to each other, and its strides along batch, heads and queries: 0 where it repeats."""
    if mask is None:
        return None, (0, 0, 0)
    mask = mask.reshape((1,) * (scores.dim() - mask.dim()) + mask.shape)
    mask = mask.expand(*mask.shape[:-1], scores.shape[-1]).contiguous()
    batch, head, query, _ = mask.expand(scores.shape).stride()
    return mask, (batch, head, query)
