"""Weights that are kept in bf16 alone: an update makes them wide, steps them, and rounds them at random."""

from math import prod

from torch import Tensor

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference.stochastic_rounding import Elements
from megapipe.kernels.registry import Registry
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState
from megapipe.random.rounding import rounding_key


def elements_of(segment: Segment, skipped: int = 0) -> Elements:
    """Which elements of the whole parameter a tensor rank's shard holds, from that number on."""
    shape, starts, own = segment.spec.shape, segment.box.starts, segment.box.shape
    axis = segment.spec.partition_axis or 0
    inner = prod(shape[axis + 1 :])
    return Elements(starts[axis] * inner, own[axis] * inner, shape[axis] * inner, skipped)


def round_weights(state: UnitState, wide: Tensor, seed: int, update: int, kernels: Registry = OPS) -> None:
    """Overwrite the newest weights by `wide`, their fp32 values, the same bits however the weights are cut.

    update: number of the unit's update. kernels: which backend rounds. Padding stays as it is.
    """
    op = kernels.pick("stochastic_rounding", wide)
    for segment in state.table:
        held = state.held(segment)
        if held:
            target, source = state.in_shard(state.master, segment), state.in_shard(wide, segment)
            key = rounding_key(seed, segment.spec.name, update)
            op.round_to(target, source, key, elements_of(segment, held.start))
