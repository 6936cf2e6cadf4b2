"""What a schedule keeps in memory by its order alone, whatever the times."""

import numpy as np

from megapipe.schedules.actions import Kind
from megapipe.schedules.table import Table


def peak_activations(table: Table) -> tuple[float, ...]:
    """Most activations alive at once on each rank, in micro-batches of the whole rank's layers.

    An activation lives from its forward to its backward, or to the input half of a split one.
    """
    return _peaks(table, (Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT))


def pending_weight_halves(table: Table) -> tuple[float, ...]:
    """Most weight halves that wait at once on each rank, in micro-batches of the whole rank's layers."""
    return _peaks(table, (Kind.BACKWARD_INPUT,), (Kind.BACKWARD_WEIGHT,))


def _peaks(table: Table, opening: tuple[Kind, ...], closing: tuple[Kind, ...]) -> tuple[float, ...]:
    stages_on_rank = np.bincount(table.header.stage_ranks, minlength=table.header.num_ranks)
    share = 1.0 / (np.where(table.unit < 0, 1, table.units) * stages_on_rank[table.rank])
    change = np.where(table.is_kind(*opening), share, 0.0) - np.where(table.is_kind(*closing), share, 0.0)
    peaks = []
    for first, last in zip(table.offsets, table.offsets[1:], strict=False):
        peaks.append(float(np.round(np.cumsum(change[first:last]).max(initial=0.0), 9)))
    return tuple(peaks)
