"""Dropout whose masks depend only on the seed and on global indices, so that every layout drops the same channels."""

import torch
from torch import Tensor, nn

from megapipe.kernels.reference.dropout import numbers, site_word, token_keys
from megapipe.kernels.registry import Registry
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.linear import OnShards, num_tokens, own_tokens

EMBEDDING_SITE = 0


def block_sites(index: int) -> tuple[int, int, int]:
    """Return the numbers of the dropout sites in block `index`: attention weights, attention output, MLP output."""
    return 1 + 4 * index, 2 + 4 * index, 3 + 4 * index


class Dropout(nn.Module, OnShards):
    """Dropout at one site of the model.

    probability: of zeroing an element. site: global number of this dropout.
    """

    def __init__(self, probability: float, site: int, kernels: Registry) -> None:
        super().__init__()
        self.probability = probability
        self.site = site_word(site)
        self.kernels = kernels

    def active(self, context: MicrobatchContext) -> bool:
        """Return whether this micro-batch uses dropout here."""
        return self.probability > 0.0 and context.training

    def forward(self, x: Tensor, context: MicrobatchContext) -> Tensor:
        """Drop channels of hidden states [b, s, h], of all tokens or of this rank's."""
        if not self.active(context):
            return x
        return self._drop(x, self._row_keys(context, x).unsqueeze(-1), numbers(0, x.shape[2], x.device))

    def add(self, update: Tensor, residual: Tensor, context: MicrobatchContext | None) -> Tensor:
        """Return residual [b, s, h] plus an update, with channels of the update dropped."""
        if context is None or not self.active(context):
            return residual + update
        op = self.kernels.pick("bias_dropout_residual", update)
        return op.apply(update, None, residual, self._row_keys(context, update), self.probability)

    def drop_attention(self, weights: Tensor, first_head: int, context: MicrobatchContext) -> Tensor:
        """Drop attention weights [b, heads, s, s] of the global heads that start at `first_head`: channel = head * s +
        key."""
        if not self.active(context):
            return weights
        _, heads, length, _ = weights.shape
        keys = self._keys(context, length)[:, None, :, None]
        channels = numbers(first_head * length, heads * length, weights.device)
        return self._drop(weights, keys, channels.view(heads, 1, length))

    def drop_weights(
        self, weights: Tensor, first_head: int, queries: Tensor, keys: Tensor, length: int, context: MicrobatchContext
    ) -> Tensor:
        """Drop attention weights [b, heads, rows, columns] as `drop_attention` does, for some queries and keys: int64
        positions in samples of `length` tokens."""
        rows = self._keys(context, queries)[:, None, :, None]
        heads = torch.arange(first_head, first_head + weights.shape[1], device=keys.device).view(-1, 1, 1)
        return self._drop(weights, rows, (heads * length + keys).to(torch.int32))

    def _row_keys(self, context: MicrobatchContext, x: Tensor) -> Tensor:
        """Return the random-number keys of the tokens whose hidden states are x [b, s, h]."""
        return own_tokens(self._keys(context, num_tokens(x, self.sequence)), self.sequence)

    def _keys(self, context: MicrobatchContext, tokens: int | Tensor) -> Tensor:
        """Return the random-number keys of tokens: their positions in samples, or the number of this rank's tokens."""
        if context.ordinals is None:
            raise ValueError("dropout needs the samples' ordinals: pass ordinals in the context, or training=False")
        if isinstance(tokens, int) and context.token_numbers is not None:
            tokens = context.token_numbers
        return token_keys(context.seed, context.ordinals, self.site, tokens)

    def _drop(self, x: Tensor, keys: Tensor, channels: Tensor) -> Tensor:
        return self.kernels.pick("dropout", x).apply(x, keys, channels, self.probability)
