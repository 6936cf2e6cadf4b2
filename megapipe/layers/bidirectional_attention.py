"""Self-attention in which every token sees all of its sample, before and behind it, but no padding."""

import math

import torch
from torch import Tensor

from megapipe.layers.attention import Attention
from megapipe.layers.context import BertContext, MicrobatchContext


class BidirectionalAttention(Attention):
    """One block's attention over samples of the lengths in a BertContext."""

    causal = False

    def _fused_mask(self, query: Tensor, context: MicrobatchContext) -> Tensor:
        return visible_keys(context, query.shape[2])[:, None, None, :]

    def _weights(self, query: Tensor, key: Tensor, context: MicrobatchContext) -> Tensor:
        visible = visible_keys(context, key.shape[1])
        hidden = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -math.inf)
        scores = torch.bmm(query, key.transpose(1, 2)).view(len(hidden), -1, key.shape[1])
        weights = torch.softmax(torch.add(hidden.unsqueeze(1), scores, alpha=self.scale), dim=-1)
        return weights.view(query.shape[0], query.shape[1], key.shape[1])


def visible_keys(context: MicrobatchContext, num_tokens: int) -> Tensor:
    """bool [b, s]: the tokens of each sample that are not padding. Raises ValueError without lengths."""
    if not isinstance(context, BertContext) or context.lengths is None:
        raise ValueError("attention over padded samples needs their lengths: pass a BertContext with lengths")
    return torch.arange(num_tokens, device=context.lengths.device) < context.lengths.unsqueeze(1)
