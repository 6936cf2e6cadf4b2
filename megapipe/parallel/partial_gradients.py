"""Gradients of which each tensor rank has a part: weights that all ranks hold whole and use on their own tokens."""

import torch
from torch import Tensor

from megapipe.parallel.groups import Group
from megapipe.parallel.unit_state import UnitState


def sum_partial_gradients(state: UnitState, gradient: Tensor, group: Group) -> None:
    """Replace the partial parameters' gradients by their sums over the ranks of `group`: one exchange for all of them.

    gradient: a flat accumulator of `state`. Ranks hold the same bits afterwards.
    """
    parts = [gradient[segment.start : segment.stop] for segment in state.table if segment.spec.name in state.partial]
    if not parts:
        return
    total = torch.cat(parts)
    group.all_reduce(total)
    for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed)
