"""AdamW on flat tensors (Loshchilov and Hutter, 2019, algorithm 2), the same bits wherever segments may be cut.

A kernel of the registry runs the step, a buffer at a time, where one is picked; else torch's fused kernel does. On
CPUs that kernel computes whole vector registers with fused multiply-adds and the elements left over without them, so
that a shard's end would differ from the same elements inside a longer shard. Buffers of units are cut at multiples of
`SEGMENT_ALIGNMENT`, which no register straddles; what a tensor has beyond such a multiple, fp64, whose gradients
that kernel would scale in fp32, and bf16 moments, which it does not know, go through the registry's reference, in
elementwise operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import adamw as reference
from megapipe.kernels.reference.adamw import Coefficients
from megapipe.kernels.registry import Registry
from megapipe.optim.flat import blocks, check_flat
from megapipe.spec.parameters import SEGMENT_ALIGNMENT

Lists = list[list[Tensor]]

AdamW = Coefficients
"""What one step does beside its tensors. step counts updates from 1. weight_decay is decoupled."""


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
    found_inf: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> None:
    """Update parameters and both moments in place; all are flat fp32 (or fp64) tensors of equal sizes, list by list.
    The moments may be bf16.

    kernels: which backend runs the step. gradient_scale: 0-dim, multiplies every gradient first (clipping; 1 / loss
    scale). found_inf: 0-dim fp32; where it is not 0 nothing changes. Neither makes a GPU wait for the host. Gradients
    may be overwritten. copies: bf16, one a parameter or none at all, overwritten by the rounded new parameters.
    Raises ValueError when a tensor is not flat and contiguous, or dtypes are mixed.
    """
    moments = [*first_moments, *second_moments]
    rounded = {moment.dtype for moment in moments} == {torch.bfloat16}
    check_flat("AdamW", (*parameters, *gradients, *([] if rounded else moments)))
    if not parameters:
        return
    kernel = kernels.pick("adamw", parameters[0])
    lists: Sequence[Sequence[Tensor]] = [parameters, gradients, first_moments, second_moments]
    lists = [*lists, copies] if copies else lists
    if kernel is reference and not rounded and parameters[0].dtype == torch.float32:
        whole, lists = _cut(lists)
        _fused(whole, update, gradient_scale, found_inf)
    for buffers in blocks(lists) if kernel is reference else zip(*lists, strict=True):
        bf16 = buffers[4] if copies else None
        kernel.step(*buffers[:4], update, parameter=bf16, gradient_scale=gradient_scale, skip=found_inf)


def _cut(lists: Sequence[Sequence[Tensor]]) -> tuple[Lists, Lists]:
    """What torch's kernel may take of tensors that belong together, and what is left."""
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


def _fused(lists: Lists, update: AdamW, gradient_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """torch's kernel, which divides gradients by its scale and counts the step itself."""
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
        found_inf=found_inf,
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
