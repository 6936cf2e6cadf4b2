"""The canonical global gradient norm: the same bits on every rank and for every pipeline layout.

Sums of squares are taken per block of 65,536 elements of a parameter's shard, added in float64, and the parameters'
sums are added in float64 in global name order. (A single fp32 norm of 30 million elements is off by 1.7e-3.)
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megapipe.parallel.unit_state import UnitState

BLOCK = 65_536

SquaredNorm = Callable[[Tensor], Tensor]
"""Sum of squares of a flat tensor with at least one element, by blocks as `squared_norm` takes them: a float64 scalar
on its device, finite only if every element is."""


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor in float64, block by block; a float64 scalar on its device."""
    size = values.numel()
    if 0 < size < BLOCK:
        return torch.linalg.vector_norm(values).double().square()
    whole = size // BLOCK * BLOCK
    total = torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1).double().square().sum()
    return total if whole == size else total + squared_norm(values[whole:])


def squared_norms(
    states: Iterable[UnitState], update: int = 0, squared_norm: SquaredNorm = squared_norm
) -> dict[str, Tensor]:
    """Each counted parameter's squared gradient norm by its name: float64 scalars, for those with elements here.

    Where replicas share the state out, that of the elements in this rank's shard.

    update: whose gradients, where several are alive. squared_norm: of one parameter's owned elements.
    """
    found = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        for segment in state.table.counted():
            if state.held(segment):
                found[segment.spec.name] = squared_norm(state.in_shard(gradient, segment))
    return found


def uncounted_flaw(states: Iterable[UnitState], update: int = 0) -> dict[str, Tensor]:
    """Zero where all gradients that another tensor rank counts are finite here too, else not a number: a float64
    scalar, under the name of one of them. Empty where there are none.

    Tensor ranks find the gradients of parameters that they do not share each for itself: a fault of one rank would
    else change its copy alone.
    """
    found = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        counted = {segment.spec.name for segment in state.table.counted()}
        for segment in state.table:
            if segment.spec.name not in counted and state.held(segment) and not segment.spec.balance_rate:
                found[segment.spec.name] = state.in_shard(gradient, segment)
    if not found:
        return {}
    norms = torch.stack(torch._foreach_norm(list(found.values())))
    return {next(iter(found)): norms.sum().double() * 0.0}


def name_positions(names: Sequence[str]) -> dict[str, int]:
    """Position of every parameter of the whole model in the vector of squared norms: global name order.

    Ranks sum such vectors over the pipeline and tensor groups: entries of other ranks' parameters are zero, so that
    adding them changes no bit.
    """
    return {name: position for position, name in enumerate(sorted(set(names)))}
