"""Collectives of sequence parallelism, which cut hidden states along the tokens (Korthikanti et al. 2022, 2205.05198).

In place of f and g of parallel/collectives.py stands the pair of their section 4.2.2: where a region begins in which
every rank computes its own part of the channels, the ranks' tokens are gathered, and where it ends the parts' sum is
scattered over the tokens. What one does forward, the other does backward. Tokens are the dimension 1 of [b, s, h].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.parallel.groups import Group


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens [b, s / t, h] as [b, s, h]; the gradient of each is the sum of the ranks' gradients."""
    return _SequenceGather.apply(x, group)


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens [b, s / t, h] of the sum of all ranks' `x` [b, s, h]; gradients of all tokens are gathered.

    Raises:
        ValueError: the tokens cannot be cut into equal parts.
    """
    return _ScatterSum.apply(x, group)


def start_gather(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to gather [b, n, h] of every rank; the call that waits for it gives [t, b, n, h]."""
    return group.start_all_gather(x.contiguous())


def start_scatter(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to sum [t, b, n, h] over the ranks; the call that waits for it gives this rank's [b, n, h]."""
    return group.start_reduce_scatter(x.contiguous())


def by_rank(x: Tensor, size: int) -> Tensor:
    """[b, s, h] as [t, b, s / t, h], a view. Raises ValueError where `size` does not divide s."""
    batch, tokens, *channels = x.shape
    if tokens % size:
        raise ValueError(
            f"{tokens} tokens of a tensor of shape {tuple(x.shape)} are not divisible by {size} tensor ranks"
        )
    return x.view(batch, size, tokens // size, *channels).transpose(0, 1)


def joined(x: Tensor) -> Tensor:
    """[t, b, n, h] as [b, t n, h]: a view of one sample, else a copy."""
    size, batch, tokens, *channels = x.shape
    return x.transpose(0, 1).reshape(batch, size * tokens, *channels)


class _SequenceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return joined(start_gather(x, group)())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_scatter(by_rank(gradient.contiguous(), ctx.group.size), ctx.group)(), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_scatter(by_rank(x.contiguous(), group.size), group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return joined(start_gather(gradient, ctx.group)()), None
