"""Softmax of scaled and masked attention scores, in torch. All is fp32 (fp64 for fp64), and rounded once."""

import torch
from torch import Tensor

from megapipe.kernels.reference.dtypes import to_dtype, wide


def forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Attention weights of scores [b, heads, q, k], in their shape and dtype: softmax(scale * scores) over the keys.

    A hidden key weighs 0, whatever its score; a row that sees no key, or only scores of minus infinity, is all 0.

    mask: bool, broadcasts to the scores' shape, True where a key is seen; [b, 1, 1, k] hides padding.
    causal: query i of q stands at position i + k - q and sees that position and those before it; window: at most so
    many of them, only with causal. Raises ValueError for arguments that break these rules.
    """
    check(scores, mask, causal, window)
    scaled = wide(scores) * scale
    visible = _visible(scores, mask, causal, window)
    if visible is not None:
        scaled = scaled.masked_fill(~visible, -torch.inf)
    largest = scaled.detach().amax(-1, keepdim=True) if scaled.shape[-1] else scaled.new_zeros(())
    exponentials = (scaled - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    return to_dtype(exponentials / total.masked_fill(total == 0, 1.0), scores.dtype)


def input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Gradient of the scores, from that of the weights and the weights y."""
    weights, gradient = wide(y), wide(dy)
    return to_dtype(scale * weights * (gradient - (weights * gradient).sum(-1, keepdim=True)), y.dtype)


def check(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> None:
    """Raises ValueError unless they are arguments of `forward`."""
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
    """bool, broadcasts to the scores: where a key is seen; None where all are."""
    if not causal:
        return mask
    queries, keys = scores.shape[-2:]
    query = torch.arange(keys - queries, keys, device=scores.device)
    distance = query.unsqueeze(1) - torch.arange(keys, device=scores.device)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen if mask is None else seen & mask
