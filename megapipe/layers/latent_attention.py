"""Multi-latent attention: keys and values are computed from a small latent of each token (DeepSeek-V2, arXiv
2405.04434, section 2.1).

A token has one latent for the keys and values of all heads, one rotated key that all heads share and, in some models,
a latent for queries. Generation caches only latents and rotated keys. Every tensor rank computes the latents of all
tokens, and its own heads; under sequence parallelism it computes latents of its own tokens, which are then gathered,
because they are narrower than hidden states.
"""

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.kernels.registry import Registry
from megapipe.layers.attention import Attention
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.linear import ColumnParallelLinear, OnShards, OwnTokensLinear, Shapes, within
from megapipe.layers.norms import Norm
from megapipe.layers.split import Rerun, SplitTape
from megapipe.parallel.collectives import copy_to_group, gather_tokens
from megapipe.parallel.groups import Group

EPSILON = 1e-6
"""Epsilon of the norms of latents, independent of the model's norm_epsilon (transformers' DeepseekV2Attention)."""


class MultiLatentAttention(Attention, OnShards):
    """One block's multi-latent attention on one tensor rank, which has an equal part of the heads.

    shapes: of `kv_down.weight` (latent + rotated channels, hidden), `kv_latent_norm.weight` (latent),
    `kv_up.weight` (heads x (d - rotated channels + d'), latent) with the key before the value, and of `query.weight`
    (heads x d, hidden), or `query_down`, `query_latent_norm` and `query_up` likewise. Among the d channels of a head,
    the rotated ones come first, in queries and in keys; values have d' channels.
    """

    def _add_projections(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        self.group = group
        self.kv_groups, self.heads_per_group = model.num_heads // group.size, 1
        self.head_dim, self.value_dim, self.latent_size = model.head_dim, model.value_dim, shapes["kv_up.weight"][-1]
        self.query_down: OwnTokensLinear | None = None
        if model.query_latent_size is None:
            self.query = ColumnParallelLinear(within(shapes, "query"), group)
        else:
            self.query_down = OwnTokensLinear(within(shapes, "query_down"), group)
            self.query_latent_norm = _latent_norm(model, within(shapes, "query_latent_norm"), kernels)
            self.query_up = ColumnParallelLinear(within(shapes, "query_up"), group)
        self.kv_down = OwnTokensLinear(within(shapes, "kv_down"), group)
        self.kv_latent_norm = _latent_norm(model, within(shapes, "kv_latent_norm"), kernels)
        self.kv_up = ColumnParallelLinear(within(shapes, "kv_up"), group)

    def _projected(self, x: Tensor, context: MicrobatchContext, rerun: Rerun | None) -> tuple[Tensor, Tensor, Tensor]:
        tape = context.tape
        query = self._prepare(self.queries(x, tape, rerun), None, context)
        latent, shared = self.latents(x, tape, rerun)
        own, value = (
            self.kv_up(latent, tape)
            .unflatten(-1, (self.kv_groups, 1, -1))
            .split([self.head_dim - shared.shape[-1], self.value_dim], dim=-1)
        )
        whole = copy_to_group(shared, self.group) if self.sequence is None else gather_tokens(shared, self.group)
        rotated = self._prepare(whole[:, :, None, None], None, context)
        return query, torch.cat([rotated.expand(-1, -1, self.kv_groups, -1, -1), own], dim=-1), value

    def queries(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Return queries [b, s, heads, 1, d], before rotation, for hidden states [b, s, h]."""
        if self.query_down is None:
            query = self.query(x, tape, rerun)
        else:
            query = self.query_up(self.query_latent_norm(self.query_down(x, tape, rerun), tape), tape)
        return query.unflatten(-1, (self.kv_groups, 1, self.head_dim))

    def latents(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> tuple[Tensor, Tensor]:
        """Return normalised latents [b, s, c] of keys and values, and shared keys [b, s, r] before rotation."""
        down = self.kv_down(x, tape, rerun)
        latent, shared = down.split([self.latent_size, down.shape[-1] - self.latent_size], dim=-1)
        return self.kv_latent_norm(latent, tape), shared


def _latent_norm(model: ModelConfig, shapes: Shapes, kernels: Registry) -> Norm:
    return Norm(model.head_norm_kind.op, shapes, EPSILON, kernels)
