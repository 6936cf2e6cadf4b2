"""Attention weights by torch's matrix product and a backend's fused softmax."""

from types import ModuleType

import torch
from torch import Tensor


def apply_with(softmax: ModuleType, query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """`megapipe.kernels.reference.attention_probabilities.apply` with the `forward` of this module of softmax."""
    num_keys, length, _ = key.shape
    # The scale enters the product: unscaled scores might leave the range of fp16.
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0.0, alpha=scale)
    by_head = scores.view(num_keys, query.shape[1] // length, length, length)
    return softmax.forward(by_head, None, 1.0, True, window).view(scores.shape)
