"""The ops of attention except its products, in torch: rotary positions (Su et al. 2021, 2104.09864), masked softmax,
and the softmax of causally masked scores.

All arithmetic is in fp32 (fp64 for fp64), and results are rounded once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.reference.norms import to_dtype, wide
from megapipe.kernels.registry import Implementation, constant_when_compiled, opaque


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation; x itself is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradient, cosine, -sine), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    pairs = [first * cosine - second * sine, second * cosine + first * sine]
    return to_dtype(torch.cat(pairs, dim=-1), x.dtype)


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel pairs of x [b, s, heads, d] by the angles of cosine and sine [s, d/2].

    Pair i is channels i and i + d/2 (as in Llama and GPT-NeoX).
    """
    return _Rotation.apply(x, cosine.unsqueeze(-2), sine.unsqueeze(-2))


def softmax_forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Return the attention weights of scores [b, heads, q, k], in their shape and dtype: softmax(scale * scores) over
    the keys.

    A hidden key has weight 0, whatever its score; a row that sees no key, or only scores of minus infinity, is all 0.

    mask: bool, broadcasts to the scores' shape, True where a key is seen; [b, 1, 1, k] hides padding.
    causal: query i of q is at position i + k - q and sees that position and those before it; window: at most this
    number of them, only with causal. Raises ValueError for arguments that break these rules.
    """
    check_softmax(scores, mask, causal, window)
    scaled = wide(scores) * scale
    visible = _visible(scores, mask, causal, window)
    if visible is not None:
        scaled = scaled.masked_fill(~visible, -torch.inf)
    largest = scaled.detach().amax(-1, keepdim=True) if scaled.shape[-1] else scaled.new_zeros(())
    exponentials = (scaled - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    return to_dtype(exponentials / total.masked_fill(total == 0, 1.0), scores.dtype)


def softmax_input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores, from the gradient dy of the weights and the weights y."""
    weights, gradient = wide(y), wide(dy)
    return to_dtype(scale * weights * (gradient - (weights * gradient).sum(-1, keepdim=True)), y.dtype)


def check_softmax(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> None:
    """Raise ValueError unless these are valid arguments of `softmax_forward`."""
    if scores.dim() != 4:
        raise ValueError(f"scores are {list(scores.shape)}, not [batch, heads, queries, keys]; reshape them")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"the mask is {mask.dtype}, not torch.bool, True where a key is seen; for one to add: mask == 0"
        )
    if mask is not None and torch.broadcast_shapes(mask.shape, scores.shape) != scores.shape:
        raise ValueError(f"a mask of {list(mask.shape)} has axes that the scores, {list(scores.shape)}, lack")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window is {window} and causal {causal}; a window is at least 1 key, and only for causal")


def _visible(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    """Return a mask, bool, that broadcasts to the scores and is True where a key is seen; None if all are seen."""
    if not causal:
        return mask
    queries, keys = scores.shape[-2:]
    query = torch.arange(keys - queries, keys, device=scores.device)
    distance = query.unsqueeze(1) - torch.arange(keys, device=scores.device)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen if mask is None else seen & mask


def attention_probabilities(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """Return attention weights [n, rows, s] for query [n, rows, d] and key [n, s, d], where rows = query heads of a
    key x s.

    Row r is the query at position r mod s. It sees its own and earlier positions, at most `window` in all.
    """
    length = key.shape[1]
    mask = causal_mask(length, window, query.dtype, query.device)
    heads = query.shape[1] // length
    # The mask is the addend of the product, which saves a pass over the scores.
    addend = mask.expand(heads, length, length).reshape(1, heads * length, length).expand(key.shape[0], -1, -1)
    return torch.baddbmm(addend, query, key.transpose(1, 2), alpha=scale).softmax(dim=-1)


@constant_when_compiled
def causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask [s, s]: 0 where the query (row) sees the key (column), minus infinity elsewhere."""
    return _causal_mask(length, window, dtype, device)


@functools.lru_cache(maxsize=8)
def _causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        position = torch.arange(length, device=device)
        distance = position.unsqueeze(1) - position
        hidden = (distance < 0) | (distance >= (length if window is None else window))
        return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


def softmax_operators(
    backend: str, forward: Callable[..., Tensor], input_gradient: Callable[[Tensor, Tensor, float], Tensor]
) -> tuple[Implementation, Implementation]:
    """Return softmax and attention_probabilities of a backend, as operators with gradients.

    forward, input_gradient: take the arguments of `softmax_forward`, checked, and of `softmax_input_gradient`, and
    return contiguous tensors.
    """
    gradient = opaque(
        f"softmax_{backend}_input_gradient(Tensor dy, Tensor y, float scale) -> Tensor",
        lambda dy, y, scale: torch.empty_like(y, memory_format=torch.contiguous_format),
    )(input_gradient)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.scale = inputs[2]

    def differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        return gradient(dy, weights, ctx.scale), None, None, None, None

    @opaque(
        f"softmax_{backend}(Tensor scores, Tensor? mask, float scale, bool causal, SymInt? window) -> Tensor",
        lambda scores, *_: torch.empty_like(scores, memory_format=torch.contiguous_format),
        keep,
        differentiate,
    )
    def softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
        check_softmax(scores, mask, causal, window)
        return forward(scores, mask, scale, causal, window)

    def probabilities(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
        num_keys, length, _ = key.shape
        # Scale within the product, because unscaled scores might exceed the range of fp16.
        scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0.0, alpha=scale)
        by_head = scores.view(num_keys, query.shape[1] // length, length, length)
        return softmax(by_head, None, 1.0, True, window).view(scores.shape)

    return Implementation(forward=softmax, input_gradient=gradient), Implementation(apply=probabilities)
