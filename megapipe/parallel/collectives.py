"""Differentiable collectives of tensor parallelism and sequence parallelism.

`copy_to_group` and `reduce_from_group` are f and g of Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053, section 3),
a conjugate pair: the forward of one is the backward of the other. f is applied to a replicated tensor before a region
in which every rank computes its own part, and g to the parts after it, which sums them. If the parts are slices along
a dimension, `gather_from_group` takes the place of g.

Sequence parallelism cuts hidden states along the tokens (Korthikanti et al. 2022, arXiv 2205.05198) and uses the pair
of its section 4.2.2: before a region in which every rank computes its own part of the channels, the tokens of all
ranks are gathered, and after it the sum of the parts is scattered over the tokens. The backward of one is the forward
of the other. Tokens are dimension 1 of [b, s, h].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.parallel.groups import DistributedGroup, Group, ReduceOperation


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`, which is the same on every rank; its gradient is the sum of all ranks' gradients."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' `x`, the same on every rank; the gradient is passed to each `x` unchanged."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_from_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return all ranks' slices `x` joined along `dim`, the same on every rank.

    Later computation is the same on every rank, so the gradient of a slice is its part of the joined gradient.
    """
    return x if group.size == 1 else _Gather.apply(x, group, dim)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send slice j of `x` [size, ...] to rank j, and return the received slices [size, ...] in rank order.

    Gradients are sent back in the same way.
    """
    return x if group.size == 1 else _AllToAll.apply(x, group)


def unsharded(shard: Tensor, group: Group, axis: int | None) -> Tensor:
    """Return the whole of a parameter that ranks shard along an axis, without a gradient. None: each rank has all of
    it."""
    if axis is None or group.size == 1:
        return shard
    return torch.cat(group.all_gather(shard.contiguous()).unbind(0), axis)


def largest_in_group(x: Tensor, group: Group) -> Tensor:
    """Return the elementwise maximum of all ranks' `x`, the same on every rank, without a gradient."""
    return x if group.size == 1 else _reduced(x.detach(), group, "max")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduced(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return torch.cat(group.start_all_gather(x)().unbind(0), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        part = gradient.chunk(ctx.group.size, ctx.dim)[ctx.group.rank]
        return part.clone(memory_format=torch.contiguous_format), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _reduced(x: Tensor, group: Group, op: ReduceOperation = "sum") -> Tensor:
    """Return all ranks' `x`, reduced by `op`, in a new tensor."""
    if not isinstance(group, DistributedGroup):
        total = x.detach().clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, op)
        return total
    with group.errors_named_where_run("all_reduce"):
        started = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group.group_name)
    return group.finished(started, "all_reduce")


def _exchanged(x: Tensor, group: Group) -> Tensor:
    """Return the slices for this rank of all ranks' `x`, in a new tensor."""
    if not isinstance(group, DistributedGroup):
        return group.all_gather(x)[:, group.rank].contiguous()
    splits = [1] * group.size
    with group.errors_named_where_run("all_to_all"):
        started = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), splits, splits, group.group_name)
    return group.finished(started, "all_to_all")


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Return all ranks' tokens [b, s / t, h] as [b, s, h]; the gradient of each is the sum of the ranks' gradients."""
    return _SequenceGather.apply(x, group)


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens [b, s / t, h] of the sum of all ranks' `x` [b, s, h]; their gradients are gathered.

    Raises:
        ValueError: the tokens cannot be cut into equal parts.
    """
    return _ScatterSum.apply(x, group)


def start_gather(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start gathering [b, n, h] of every rank. Return a function that waits for the result, [t, b, n, h]."""
    return group.start_all_gather(x.contiguous())


def start_scatter(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start summing [t, b, n, h] over the ranks. Return a function that waits for this rank's [b, n, h]."""
    return group.start_reduce_scatter(x.contiguous())


def by_rank(x: Tensor, size: int) -> Tensor:
    """Return a view of [b, s, h] as [t, b, s / t, h]. Raises ValueError if `size` does not divide s."""
    batch, tokens, *channels = x.shape
    if tokens % size:
        raise ValueError(
            f"{tokens} tokens of a tensor of shape {tuple(x.shape)} are not divisible by {size} tensor ranks"
        )
    return x.view(batch, size, tokens // size, *channels).transpose(0, 1)


def joined(x: Tensor) -> Tensor:
    """Return [t, b, n, h] as [b, t n, h]: a view for one sample, otherwise a copy."""
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
