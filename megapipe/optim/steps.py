"""Steps of AdamW and SGD on flat tensors, whose bits do not depend on where segments are cut.

AdamW (Loshchilov and Hutter, 2019, algorithm 2): a kernel of the registry runs the step, a buffer at a time, if one is
chosen; otherwise torch's fused kernel does. On CPUs that kernel computes whole vector registers with fused
multiply-adds, and the remaining elements without them, so the end of a shard would differ from the same elements
inside a longer shard. Buffers of units are cut at multiples of `SEGMENT_ALIGNMENT`, which no register straddles. The
registry's reference, in elementwise operations, processes the elements of a tensor beyond such a multiple, fp64
tensors, whose gradients torch's kernel would scale in fp32, and bf16 moments, which torch's kernel does not support.

SGD has the recursion of torch.optim.SGD. Its decay is *coupled*: it is added to the gradient, and so enters the
momentum (AdamW's is decoupled). There is no dampening, and the learning rate multiplies the momentum, so that changing
it also affects past gradients (unlike Sutskever et al., 2013). The step consists of torch's elementwise operations.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference.optimizer import Coefficients
from megapipe.kernels.registry import Registry
from megapipe.spec.parameters import SEGMENT_ALIGNMENT

BLOCK = 1 << 16
"""Number of elements per block of a step on the CPU."""


def check_flat(optimizer: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless all tensors are flat, contiguous and fp32, or all of them fp64."""
    dtypes: set[torch.dtype] = set()
    for tensor in tensors:
        dtypes.add(tensor.dtype)
        if tensor.dim() != 1 or tensor.dtype not in (torch.float32, torch.float64) or not tensor.is_contiguous():
            raise ValueError(
                f"{optimizer} got a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; pass flat, contiguous fp32 "
                "views (or fp64 ones)"
            )
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"{optimizer} got {names} tensors in one step; pass parameters, gradients and moments of one")


def blocks(lists: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors that belong together, block by block; whole on a GPU. Raises ValueError if lengths differ."""
    for tensors in zip(*lists, strict=True):
        if tensors[0].is_cuda:
            yield tensors
        else:
            yield from zip(*(torch.split(tensor, BLOCK) for tensor in tensors), strict=True)


Lists = list[list[Tensor]]

AdamW = Coefficients
"""Numbers of one step. step counts updates from 1. weight_decay is decoupled."""


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    update: AdamW,
    *,
    kernels: Registry = OPS,
    gradient_scale: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> None:
    """Update parameters and both moments in place; all are flat fp32 (or fp64) tensors of equal sizes, list by list.
    The moments may be bf16.

    kernels: which backend runs the step. gradient_scale: 0-dim, multiplies every gradient first (clipping; 1 / loss
    scale), without synchronizing a GPU with the host. Gradients may be overwritten. copies: bf16, one per parameter or
    none, overwritten with the rounded new parameters. Raises ValueError if a tensor is not flat and contiguous, or
    dtypes are mixed.
    """
    moments = [*first_moments, *second_moments]
    rounded = {moment.dtype for moment in moments} == {torch.bfloat16}
    check_flat("AdamW", (*parameters, *gradients, *([] if rounded else moments)))
    if not parameters:
        return
    kernel = kernels.pick("adamw", parameters[0])
    is_reference = kernel is kernels.reference("adamw")
    lists: Sequence[Sequence[Tensor]] = [parameters, gradients, first_moments, second_moments]
    lists = [*lists, copies] if copies else lists
    if is_reference and not rounded and parameters[0].dtype == torch.float32:
        whole, lists = _cut(lists)
        _fused(whole, update, gradient_scale)
    for buffers in blocks(lists) if is_reference else zip(*lists, strict=True):
        bf16 = buffers[4] if copies else None
        kernel.step(*buffers[:4], update, parameter=bf16, gradient_scale=gradient_scale)


def _cut(lists: Sequence[Sequence[Tensor]]) -> tuple[Lists, Lists]:
    """Divide tensors that belong together into the parts for torch's kernel and the rest."""
    alignment = 1 if lists[0][0].is_cuda else SEGMENT_ALIGNMENT
    whole: Lists = [[] for _ in lists]
    rest: Lists = [[] for _ in lists]
    for tensors in zip(*lists, strict=True):
        end = tensors[0].numel() // alignment * alignment
        for kind, tensor in enumerate(tensors):
            if end:
                whole[kind].append(tensor[:end])
            if end < tensor.numel():
                rest[kind].append(tensor[end:])
    return whole, rest


def _fused(lists: Lists, update: AdamW, gradient_scale: Tensor | None) -> None:
    """Run torch's kernel, which divides gradients by its scale and counts the step itself."""
    parameters, gradients, first_moments, second_moments, *copies = lists
    if not parameters:
        return
    steps = torch.full((len(parameters),), float(update.step - 1), device=parameters[0].device)
    adamw(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        list(steps.unbind()),
        fused=True,
        grad_scale=None if gradient_scale is None else gradient_scale.float().reciprocal(),
        found_inf=None,
        has_complex=False,
        amsgrad=False,
        beta1=update.betas[0],
        beta2=update.betas[1],
        lr=update.learning_rate,
        weight_decay=update.weight_decay,
        eps=update.epsilon,
        maximize=False,
    )
    for copy, parameter in zip(*copies, parameters, strict=True) if copies else ():
        copy.copy_(parameter)


@dataclass(frozen=True)
class SGD:
    """Numbers of one step. momentum: 0 for no momentum. weight_decay is coupled."""

    learning_rate: float
    momentum: float
    weight_decay: float


@torch.no_grad()
def sgd_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    update: SGD,
    *,
    gradient_scale: Tensor | None = None,
) -> None:
    """Update parameters and momenta in place; all are flat fp32 (or fp64) tensors of equal sizes, list by list.

    momenta: zeros before the first step; empty without momentum. gradient_scale: 0-dim, multiplies every gradient
    first (clipping), before the decay. Gradients do not change.
    Raises ValueError when a tensor is not flat and contiguous, dtypes are mixed, or lists do not match.
    """
    check_flat("SGD", (*parameters, *gradients, *momenta))
    for parameter, gradient, *momentum in blocks([parameters, gradients, *([momenta] if update.momentum else [])]):
        if gradient_scale is not None:
            gradient = gradient * gradient_scale
        if update.weight_decay:
            gradient = gradient.add(parameter, alpha=update.weight_decay)
        for buffer in momentum:
            gradient = buffer.mul_(update.momentum).add_(gradient)
        parameter.add_(gradient, alpha=-update.learning_rate)
