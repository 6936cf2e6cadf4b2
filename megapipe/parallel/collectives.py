"""Collectives that autograd sees, of tensor parallelism and of sequence parallelism.

`copy_to_group` and `reduce_from_group` are f and g of Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053, section 3),
a conjugate pair: the forward of one is the backward of the other. f is applied where a replicated tensor enters a
region in which every rank computes its own part, g where the sum of the parts leaves it. Parts that are slices along
a dimension leave it through `gather_from_group`.

Sequence parallelism cuts hidden states along the tokens (Korthikanti et al. 2022, arXiv 2205.05198) and uses the pair
of its section 4.2.2: where a region begins in which every rank computes its own part of the channels, the ranks'
tokens are gathered, and where it ends the sum of the parts is scattered over the tokens. The backward of one is the
forward of the other. Tokens are dimension 1 of [b, s, h].
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megapipe.parallel.groups import DistributedGroup, Group, ReduceOperation


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """`x`, the same on every rank; its gradient is the sum of all ranks' gradients."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum of all ranks' `x`, the same on every rank; the gradient goes to each of them as it is."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_from_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' slices `x` joined along `dim`, the same on every rank.

    What follows computes the same on every rank, so each slice's gradient is its part of the joined gradient.
    """
    return x if group.size == 1 else _Gather.apply(x, group, dim)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """x [size, ...] as [size, ...]: slice j goes to rank j, and what rank j sent here comes to place j.

    The gradient takes the same way back.
    """
    return x if group.size == 1 else _AllToAll.apply(x, group)


def largest_in_group(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum of all ranks' `x`, the same on every rank, without a gradient."""
    return x if group.size == 1 else _reduced(x.detach(), group, "max")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _joined(x, group, dim)

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


def _summed(x: Tensor, group: Group) -> Tensor:
    """A new tensor."""
    return _reduced(x, group, "sum")


def _reduced(x: Tensor, group: Group, op: ReduceOperation) -> Tensor:
    """A new tensor."""
    if not isinstance(group, DistributedGroup):
        return _reduced_between_threads(x, group, op)
    with _errors_named(group, "all_reduce"):
        name = group.group_name
        return _finished(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, name), group)


def _joined(x: Tensor, group: Group, dim: int) -> Tensor:
    """A new tensor."""
    if not isinstance(group, DistributedGroup):
        parts = _gathered_between_threads(x, group)
    else:
        with _errors_named(group, "all_gather"):
            name = group.group_name
            rows = x.reshape(1, -1)
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(rows, group.size, name)
            parts = _finished(gathered, group).view(group.size, *x.shape)
    return torch.cat(parts.unbind(0), dim)


def _exchanged(x: Tensor, group: Group) -> Tensor:
    """A new tensor."""
    if not isinstance(group, DistributedGroup):
        return _gathered_between_threads(x, group)[:, group.rank].contiguous()
    with _errors_named(group, "all_to_all"):
        shares = [1] * group.size
        name = group.group_name
        exchanged = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), shares, shares, name)
        return _finished(exchanged, group)


def _errors_named(group: DistributedGroup, operation: str) -> AbstractContextManager[None]:
    """A compiled graph has no exception handlers."""
    return nullcontext() if torch.compiler.is_compiling() else group.errors_named(operation)


def _finished(x: Tensor, group: DistributedGroup) -> Tensor:
    if not torch.compiler.is_compiling():
        group.pause()
    finished: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return finished


def _reduced_between_threads(x: Tensor, group: Group, op: ReduceOperation) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, op)
    return total


def _gathered_between_threads(x: Tensor, group: Group) -> Tensor:
    return group.all_gather(x)


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
