"""The canonical global gradient norm: the same bits on every rank and for every pipeline layout.

Squares are summed over blocks of 65,536 elements of a parameter's shard. The sums of blocks are added in float64, and
so are those of parameters, in the order of their global names. (A single fp32 norm of 30 million elements is off by
1.7e-3.)
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megapipe.parallel.unit_state import UnitState

BLOCK = 65_536

SquaredNorm = Callable[[Tensor], Tensor]
"""Return the sum of squares of a flat tensor with at least one element, in the blocks of `squared_norm`: a float64
scalar on its device, finite only if every element is."""


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor, block by block; a float64 scalar on its device."""
    size = values.numel()
    if 0 < size < BLOCK:
        return torch.linalg.vector_norm(values).double().square()
    whole = size // BLOCK * BLOCK
    total = torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1).double().square().sum()
    return total if whole == size else total + squared_norm(values[whole:])


def squared_norms(
    states: Iterable[UnitState], update: int = 0, squared_norm: SquaredNorm = squared_norm
) -> dict[str, Tensor]:
    """Return the squared gradient norm of each counted parameter that has elements on this rank: name -> float64
    scalar.

    If replicas shard the state, only the elements in this rank's shard count.

    update: number of the update whose gradients are used. squared_norm: of one parameter's owned elements.
    """
    squares = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        for segment in state.table.counted():
            if state.held(segment):
                squares[segment.spec.name] = squared_norm(state.in_shard(gradient, segment))
    return squares


def uncounted_flaw(states: Iterable[UnitState], update: int = 0) -> dict[str, Tensor]:
    """Return zero if all gradients that another tensor rank counts are finite here too, otherwise NaN: a float64
    scalar, under the name of one of them. Empty if there are none.

    Each tensor rank computes the gradients of replicated parameters itself, so a fault on one rank would otherwise
    change only its copy.
    """
    gradients = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        counted = {segment.spec.name for segment in state.table.counted()}
        for segment in state.table:
            if segment.spec.name not in counted and state.held(segment) and not segment.spec.balance_rate:
                gradients[segment.spec.name] = state.in_shard(gradient, segment)
    if not gradients:
        return {}
    norms = torch.stack(torch._foreach_norm(list(gradients.values())))
    return {next(iter(gradients)): norms.sum().double() * 0.0}


def name_positions(names: Sequence[str]) -> dict[str, int]:
    """Return the position of every parameter of the whole model in the vector of squared norms: global name order.

    Ranks sum such vectors over the pipeline and tensor groups: entries of other ranks' parameters are zero, so adding
    them changes no bit.
    """
    return {name: position for position, name in enumerate(sorted(set(names)))}
