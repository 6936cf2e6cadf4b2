"""Activations and weight halves that a schedule keeps in memory. They follow from its order, not from times."""

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import Kind, Mask
from megapipe.schedules.offload import activations_moved
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table


def peak_activations(table: Table) -> tuple[float, ...]:
    """Peak number of activations alive on each rank, in micro-batches of the rank's layers of one copy of the model.

    An activation lives from its forward to its backward, or to the input half of a split one. A recomputed activation
    lives from its recomputation on; the inputs kept until then are not counted. Activations in host memory, and those
    of shards of the vocabulary, are not counted either.
    """
    return _peaks(table, activations_made(table), activations_gone(table))


def microbatches_held(schedule: Schedule) -> tuple[float, ...]:
    """Most micro-batches whose activations each stage holds at once, in its own layers."""
    table = Table.unroll(schedule, 1 if schedule.flushes else schedule.prologue_steps + 1)
    parts = np.where(table.unit < 0, 1, table.units) * table.header.slices
    held = (
        np.where(table.stage == stage, np.where(activations_made(table), 1.0, 0.0) - activations_gone(table), 0.0)
        for stage in range(table.num_stages)
    )
    return tuple(float(np.round(np.cumsum(change / parts).max(initial=0.0), 9)) for change in held)


def activations_made(table: Table) -> Mask:
    """Mark rows after which the activations of a backward are kept: forwards or their recomputation, and reloads."""
    again = table.rows_with(Kind.RECOMPUTE)
    forwards = table.rows_with(Kind.FORWARD)
    most = max(table.header.units_per_stage) + 1
    place = table.key * most + table.unit
    made = table.is_kind(Kind.RECOMPUTE)
    made[forwards] = ~np.isin(place[forwards], place[again])
    made[activations_moved(table, Kind.RELOAD)] = True
    return made


def activations_gone(table: Table) -> Mask:
    """Mark rows after which activations are no longer kept: backwards or their input halves, and offloads."""
    gone = table.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    gone[activations_moved(table, Kind.OFFLOAD)] = True
    return gone


def pending_weight_halves(table: Table) -> tuple[float, ...]:
    """Most weight halves that wait at once on each rank, in micro-batches of the whole rank's layers."""
    return _peaks(table, table.is_kind(Kind.BACKWARD_INPUT), table.is_kind(Kind.BACKWARD_WEIGHT))


def rank_shares(table: Table) -> npt.NDArray[np.float64]:
    """Return for each row the part that it computes of a micro-batch of whole samples through its rank's layers of one
    copy of the model, shape [rows]; 0 for passes of a shard of the vocabulary."""
    stages = np.array(table.header.stages_sharing, dtype=np.int64)[table.stage]
    shares: npt.NDArray[np.float64] = 1.0 / (np.where(table.unit < 0, 1, table.units) * stages * table.header.slices)
    return np.where(table.header.is_shard[table.stage], 0.0, shares)


def _peaks(table: Table, opening: Mask, closing: Mask) -> tuple[float, ...]:
    share = rank_shares(table)
    change = np.where(opening, share, 0.0) - np.where(closing, share, 0.0)
    peaks = []
    for first, last in zip(table.offsets, table.offsets[1:], strict=False):
        peaks.append(float(np.round(np.cumsum(change[first:last]).max(initial=0.0), 9)))
    return tuple(peaks)
