"""AdamW on flat tensors (Loshchilov and Hutter, 2019, algorithm 2), bit for bit the same however they are cut.

On GPUs this is torch's fused kernel. On CPUs it is not: that kernel computes whole vector registers with fused
multiply-adds and the elements left over without them, so that a shard's end would differ from the same elements
inside a longer shard. There the step is made of torch's elementwise operations, in blocks that stay in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.optim.flat import blocks, check_flat


@dataclass(frozen=True)
class AdamW:
    """What one step does beside its tensors. step counts updates from 1. weight_decay is decoupled."""

    step: int
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    update: AdamW,
    *,
    gradient_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and both moments in place; all are flat fp32 (or fp64) tensors of equal sizes, list by list.

    gradient_scale: 0-dim, multiplies every gradient first (clipping; 1 / loss scale). found_inf: 0-dim fp32; where it
    is not 0 nothing changes. Neither makes a GPU wait for the host. Gradients may be overwritten.
    Raises ValueError when step is below 1, a tensor is not flat and contiguous, or dtypes are mixed.
    """
    if update.step < 1:
        raise ValueError(f"AdamW's step is {update.step}; it counts updates from 1")
    check_flat("AdamW", (*parameters, *gradients, *first_moments, *second_moments))
    if not parameters:
        return
    if parameters[0].is_cuda:
        _fused(parameters, gradients, first_moments, second_moments, update, gradient_scale, found_inf)
    elif found_inf is None or not found_inf.item():
        for parameter, gradient, first, second in blocks([parameters, gradients, first_moments, second_moments]):
            _step_block(parameter, gradient, first, second, update, gradient_scale)


def _step_block(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: AdamW, gradient_scale: Tensor | None
) -> None:
    beta1, beta2 = update.betas
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    if update.weight_decay:
        parameter.mul_(1 - update.learning_rate * update.weight_decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root_correction = (1 - beta2**update.step) ** 0.5
    denominator = (second.sqrt() / root_correction).add_(update.epsilon)
    parameter.addcdiv_(first, denominator, value=-update.learning_rate / (1 - beta1**update.step))


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
