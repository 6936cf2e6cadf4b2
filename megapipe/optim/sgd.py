"""Stochastic gradient descent on flat tensors, with momentum: the recursion of torch.optim.SGD.

The decay is *coupled*: it is added to the gradient, and so enters the momentum (AdamW's is decoupled). There is no
dampening, and the learning rate multiplies the momentum, so that a change of it acts on past gradients too (unlike
Sutskever et al., 2013). The step is made of torch's elementwise operations: the same bits however tensors are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.optim.flat import blocks, check_flat


@dataclass(frozen=True)
class SGD:
    """What one step does beside its tensors. momentum: 0 keeps none. weight_decay is coupled."""

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
    first (clipping), ahead of the decay. Gradients stay as they are.
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
