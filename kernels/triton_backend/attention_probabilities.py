"""Softmax of scaled, causally masked attention scores: torch's matrix product, and the masked softmax in Triton."""

import torch
from torch import Tensor

from megapipe.kernels.triton_backend import softmax
from megapipe.kernels.triton_backend.launch import refusal as refusal


def apply(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention weights [n, rows, s] for query [n, rows, d] and key [n, s, d], where rows = query heads of a key x s.

    Row r is the query at position r mod s. It sees its own position and those before it, at most `window` in all.
    """
    num_keys, length, _ = key.shape
    # The scale enters the product: unscaled scores might leave the range of fp16.
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0.0, alpha=scale)
    by_head = scores.view(num_keys, query.shape[1] // length, length, length)
    return softmax.forward(by_head, None, 1.0, True, window).view(scores.shape)
