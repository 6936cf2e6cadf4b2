"""Softmax of scaled, causally masked attention scores, in torch."""

import functools
import math

import torch
from torch import Tensor

from megapipe.kernels.opaque import constant_when_compiled


def apply(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention weights [n, rows, s] for query [n, rows, d] and key [n, s, d], where rows = query heads of a key x s.

    Row r is the query at position r mod s. It sees its own position and those before it, at most `window` in all.
    """
    length = key.shape[1]
    mask = causal_mask(length, window, query.dtype, query.device)
    heads = query.shape[1] // length
    # The mask enters the product as its addend: one pass over the scores less than masking them afterwards.
    addend = mask.expand(heads, length, length).reshape(1, heads * length, length).expand(key.shape[0], -1, -1)
    return torch.softmax(torch.baddbmm(addend, query, key.transpose(1, 2), alpha=scale), dim=-1)


@constant_when_compiled
def causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[s, s]: 0 where the query (row) sees the key (column), minus infinity elsewhere."""
    return _causal_mask(length, window, dtype, device)


@functools.lru_cache(maxsize=8)
def _causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Tensors born in inference mode could never take part in training.
    with torch.inference_mode(False):
        position = torch.arange(length, device=device)
        distance = position.unsqueeze(1) - position
        hidden = (distance < 0) | (distance >= (length if window is None else window))
        return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
