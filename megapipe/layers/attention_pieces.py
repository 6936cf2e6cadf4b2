"""Attention of some queries to some keys, in pieces that can be merged (Rabe and Staats 2021, arXiv 2112.05682).

Each piece returns its outputs and, per query, the logarithm of the sum of the exponentials of its scores. The backward
uses the merged log-sum, with which the weights of a piece are those of the whole attention, so the gradients of all
pieces add up (Dao et al. 2022, 2205.14135, appendix B.2).

Fused pieces are torch's flash kernels: on a CPU with or without a mask, on a GPU without one. The unfused path uses
plain products if there is no kernel: masks on a GPU, fp32 on a GPU, dropout.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.reference.norms import wide_dtype

LARGEST_HEAD_DIM = 256
"""Largest head dimension of a GPU's flash kernels, which must also be a multiple of 8."""

Drop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seen:
    """The keys of a piece that its queries see: all or some.

    causal: queries and keys are the same tokens, and each query sees those up to itself. visible: bool [b or 1, 1,
    rows, columns].
    """

    causal: bool = False
    visible: Tensor | None = None


@dataclass(frozen=True)
class Weighing:
    """How weights are computed from scores. drop: zeroes some of the weights [b, heads, rows, columns] and scales the
    others, the same ones at every call; None keeps all. unfused: no kernels. softcap: largest magnitude of scores.
    slopes: float64 [heads], decrease of scores per unit of `distances`, integers [rows, columns] or [b, 1, rows,
    columns]."""

    scale: float
    drop: Drop | None = None
    unfused: bool = False
    softcap: float | None = None
    slopes: Tensor | None = None
    distances: Tensor | None = None

    def bias(self, query: Tensor) -> Tensor | None:
        """Return the term added to scores [b, heads, rows, columns], in fp32 (fp64 for fp64); None if there is
        none."""
        if self.slopes is None or self.distances is None:
            return None
        dtype = wide_dtype(query)
        distances = self.distances if self.distances.dim() == 4 else self.distances[None, None]
        return distances.to(dtype) * -self.slopes.to(dtype).view(-1, 1, 1)

    def is_fused(self, query: Tensor, seen: Seen) -> bool:
        """Return whether one of torch's kernels supports this piece."""
        if self.unfused or self.drop is not None or self.softcap is not None:
            return False
        if query.device.type == "cpu":
            return True
        half = query.dtype in (torch.bfloat16, torch.float16)
        width = query.shape[-1]
        return seen.visible is None and self.slopes is None and half and width % 8 == 0 and width <= LARGEST_HEAD_DIM


def piece_forward(query: Tensor, key: Tensor, value: Tensor, seen: Seen, weighing: Weighing) -> tuple[Tensor, Tensor]:
    """Return outputs [b, heads, rows, d] and log-sums [b, heads, rows] in fp32 (fp64 for fp64), for query [b, heads,
    rows, d] and key and value [b, kv heads, columns, d]. A query that sees no key gets zeros and minus infinity."""
    if not weighing.is_fused(query, seen):
        return _unfused_forward(query, key, value, seen, weighing)
    if query.device.type == "cuda":
        mixed, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, seen.causal, scale=weighing.scale
        )
        return mixed, log_sum
    addend = _addend(query, key, seen, weighing)
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, seen.causal and addend is None, attn_mask=addend, scale=weighing.scale
    )
    if seen.visible is not None:  # the kernel's log-sum over no keys is 0
        log_sum = log_sum.masked_fill(~seen.visible.any(-1), -math.inf)
    return mixed, log_sum


def piece_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    log_sum: Tensor,
    seen: Seen,
    how: Weighing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this piece's contribution to the gradients of query, key and value.

    gradient, mixed (outputs) [b, heads, rows, d], log_sum [b, heads, rows]: of the whole attention of these queries.
    """
    if not how.is_fused(query, seen):
        return _unfused_backward(gradient, query, key, value, mixed, log_sum, seen, how)
    gradients: Any
    tensors = gradient, query, key, value, mixed
    if query.device.type == "cuda":
        # The random state of a dropout of 0.
        none = torch.zeros(2, dtype=torch.uint64, device=query.device)
        # No offsets of samples, because all have these lengths.
        lengths = (None, None, query.shape[2], key.shape[2])
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, log_sum.contiguous(), *lengths, 0.0, seen.causal, none, none, scale=how.scale
        )
    else:
        addend = _addend(query, key, seen, how)
        causal = seen.causal and addend is None
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, log_sum, 0.0, causal, attn_mask=addend, scale=how.scale
        )
    return gradients[0], gradients[1], gradients[2]


Part = tuple[range, Tensor, Tensor, Seen, Weighing]
"""A piece: numbers of queries, keys and values [b, kv heads, columns, d], which of them are seen, and how weights are
computed from scores."""


def merged_pieces(query: Tensor, sinks: Tensor | None, parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
    """Return outputs [b, heads, s, d] and log-sums [b, heads, s] of all pieces of the queries [b, heads, s, d]."""
    wide = wide_dtype(query)
    # The memory layout that the output projection needs: tokens before heads.
    mixed = torch.zeros_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
    mixed = mixed.transpose(1, 2)
    log_sum = torch.full(query.shape[:3], -math.inf, dtype=wide, device=query.device)
    for queries, key, value, seen, weighing in parts:
        rows = slice(queries.start, queries.stop)
        _merge(mixed[:, :, rows], log_sum[:, :, rows], *piece_forward(query[:, :, rows], key, value, seen, weighing))
    if sinks is not None:
        mixed, log_sum = with_sinks(mixed, log_sum, sinks)
    return mixed.to(query.dtype), log_sum


def _merge(mixed: Tensor, log_sum: Tensor, part: Tensor, part_log_sum: Tensor) -> None:
    """Merge a piece into the outputs [b, heads, rows, d] and log-sums [b, heads, rows] so far, in place."""
    merged = torch.logaddexp(log_sum, part_log_sum)
    finite = merged.masked_fill(merged == -math.inf, 0.0)
    mixed.mul_((log_sum - finite).exp_().unsqueeze(-1))
    mixed.add_(part * (part_log_sum - finite).exp_().unsqueeze(-1))
    log_sum.copy_(merged)


def with_sinks(mixed: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums of whole attention with sinks: one more score per head in the softmax, with a value
    of zero.

    mixed (outputs) [b, heads, rows, d] and log_sum [b, heads, rows] of all keys, sinks [heads] (Agarwal et al. 2025,
    arXiv 2508.10925, section 2.2; Xiao et al. 2023, arXiv 2309.17453, equation 2).
    """
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype).unsqueeze(-1))
    return (mixed * (log_sum - total).exp_().unsqueeze(-1)).to(mixed.dtype), total


def sink_gradient(gradient: Tensor, mixed: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [heads]. mixed, log_sum: results of `with_sinks`. gradient: of mixed."""
    weights = (sinks.to(log_sum.dtype).unsqueeze(-1) - log_sum).exp_()
    total = (gradient.to(log_sum.dtype) * mixed.to(log_sum.dtype)).sum(-1)
    return weights.mul_(total).sum((0, 2)).neg_().to(sinks.dtype)


def _addend(query: Tensor, key: Tensor, seen: Seen, how: Weighing) -> Tensor | None:
    """Return the term added to scores, minus infinity where a query does not see a key; None if only a causal mask
    applies."""
    bias = how.bias(query)
    if bias is not None:
        visible = _visible(query, key, seen)
        return bias if visible is None else bias.masked_fill(~visible, -math.inf)
    if seen.visible is None:
        return None
    hidden = torch.zeros(seen.visible.shape, dtype=query.dtype, device=query.device)
    return hidden.masked_fill_(~seen.visible, -math.inf)


def _visible(query: Tensor, key: Tensor, seen: Seen) -> Tensor | None:
    """Return a mask of the keys that each query sees, which broadcasts to the scores; None for all keys."""
    if not seen.causal:
        return seen.visible
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril_()


def _unfused_forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen, weighing: Weighing
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, seen, weighing)
    log_sum = scores.logsumexp(-1)
    weights = _weights(scores, log_sum)
    dropped = weights if weighing.drop is None else weighing.drop(weights)
    return _by_kv_head(dropped.to(value.dtype), value).matmul(value).view(query.shape), log_sum


def _unfused_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    log_sum: Tensor,
    seen: Seen,
    how: Weighing,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    scores = _scores(query, key, seen, how)
    weights = _weights(scores, log_sum)
    dweights = _by_kv_head(gradient, value).matmul(value.transpose(-2, -1)).view(weights.shape).to(weights.dtype)
    dropped = weights
    if how.drop is not None:
        dropped, dweights = how.drop(weights), how.drop(dweights)
    # The softmax backward subtracts one number per query, because the query's weights sum to 1.
    total = (gradient.to(weights.dtype) * mixed.to(weights.dtype)).sum(-1, keepdim=True)
    dscores = weights * (dweights - total) * how.scale
    if how.softcap is not None:  # the slope of tanh; a hidden score is minus infinity
        dscores *= 1.0 - (scores.clamp_min(-how.softcap) / how.softcap).square()
    dscores = dscores.to(dtype)
    dvalue = _by_kv_head(dropped.to(dtype), value).transpose(-2, -1).matmul(_by_kv_head(gradient, value))
    dkey = _by_kv_head(dscores, key).transpose(-2, -1).matmul(_by_kv_head(query, key))
    return _by_kv_head(dscores, key).matmul(key).view(query.shape), dkey, dvalue


def _by_kv_head(x: Tensor, key: Tensor) -> Tensor:
    """Return x [b, heads, rows, c] as [b, kv heads, heads per kv head x rows, c]."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _scores(query: Tensor, key: Tensor, seen: Seen, how: Weighing) -> Tensor:
    """Return scores [b, heads, rows, columns] in fp32 (fp64 for fp64), minus infinity where hidden."""
    scores = _by_kv_head(query, key).matmul(key.transpose(-2, -1)).to(wide_dtype(query)).mul_(how.scale)
    if how.softcap is not None:
        scores = scores.div_(how.softcap).tanh_().mul_(how.softcap)
    scores = scores.view(*query.shape[:3], key.shape[2])
    if (bias := how.bias(query)) is not None:
        scores = scores.add_(bias)
    visible = _visible(query, key, seen)
    return scores if visible is None else scores.masked_fill_(~visible, -math.inf)


def _weights(scores: Tensor, log_sum: Tensor) -> Tensor:
    """Return the weights; zeros if a query sees no key."""
    return (scores - log_sum.masked_fill(log_sum == -math.inf, 0.0).unsqueeze(-1)).exp_()
