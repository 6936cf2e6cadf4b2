"""AdamW on flat tensors (Loshchilov and Hutter, 2019, algorithm 2), bit for bit the same however they are cut.

A kernel of the registry runs the step, a buffer at a time, where one is picked; else it is torch's. On GPUs that is
its fused kernel. On CPUs it is not: that kernel computes whole vector registers with fused multiply-adds and the
elements left over without them, so that a shard's end would differ from the same elements inside a longer shard.
There the step is the registry's reference, made of elementwise operations, in blocks that stay in the cache.
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
    if kernel is reference and parameters[0].is_cuda and not rounded:
        _fused(parameters, gradients, first_moments, second_moments, update, gradient_scale, found_inf)
        for copy, parameter in zip(copies, parameters, strict=bool(copies)):
            copy.copy_(parameter)
        return
    lists = [parameters, gradients, first_moments, second_moments, *([copies] if copies else [])]
    for buffers in blocks(lists) if kernel is reference else zip(*lists, strict=True):
        bf16 = buffers[4] if copies else None
        kernel.step(*buffers[:4], update, parameter=bf16, gradient_scale=gradient_scale, skip=found_inf)


def _fused(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    update: AdamW,
    gradient_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """torch's kernel divides gradients by its scale and counts the step itself."""
    device = parameters[0].device
    steps = torch.full((len(parameters),), float(update.step - 1), device=device)
    adamw(
        list(parameters),
        list(gradients),
        list(first_moments),
        list(second_moments),
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
