"""Softmax of scaled, causally masked attention scores: torch's matrix product, and the causal softmax by apex."""

from torch import Tensor

from megapipe.kernels.apex_backend import softmax
from megapipe.kernels.apex_backend.softmax import refusal as refusal
from megapipe.kernels.fused_attention_probabilities import apply_with


def apply(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention weights [n, rows, s] for query [n, rows, d] and key [n, s, d], where rows = query heads of a key x s.

    Row r is the query at position r mod s. It sees its own position and those before it, at most `window` in all.
    """
    return apply_with(softmax, query, key, scale, window)
