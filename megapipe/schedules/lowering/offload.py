"""Adding offload: what goes to host memory behind its use and comes back ahead of the next one.

Activations go unit by unit, as KARMA swaps blocks (Wahib et al. 2020, 2008.11421, section III) and vDNN layers (Rhu
et al. 2016, 1602.08124); optimizer state goes around each unit's update, two units at a time on the device.
"""

from dataclasses import replace

import numpy as np

from megapipe.schedules.actions import COMPUTE_KINDS, KIND, MICROBATCH, Ints, Kind, Mask, rows_of
from megapipe.schedules.lowering.insertion import Insertion, InsertionOrder
from megapipe.schedules.offload import Offload, unit_places
from megapipe.schedules.table import Table


def add_offload(table: Table, offload: Offload) -> list[Insertion]:
    """The chosen units' activations out behind their forward, back ``prefetch`` compute actions ahead of their
    backward; ``table`` is cut into units.

    Where nothing would be computed meanwhile they stay. What runs again is no compute action of its own here: a
    reload goes ahead of it.
    """
    compute = table.rows_with(*COMPUTE_KINDS)
    section = (table.rank * table.num_sections + table.section)[compute]
    forward, backward = (_of_chosen(table, compute, offload, kinds) for kinds in (
        (Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT)))  # fmt: skip
    ahead = np.maximum(backward - offload.prefetch, np.searchsorted(section, section[backward]))
    # A section is followed by one or by another: what leaves in one and comes back in the next must not depend on it.
    last = np.searchsorted(section, section[forward], side="right") - 1
    leaves = np.where(section[forward] == section[backward], ahead >= forward + 2, forward < last)
    order = np.argsort(backward[leaves], kind="stable")
    out, back, ahead = compute[forward[leaves]], compute[backward[leaves][order]], ahead[leaves][order]
    anchor = np.where(ahead == 0, 0, compute[ahead - 1] + 1)
    return [
        _moving(table, Kind.OFFLOAD, out, out, InsertionOrder.OFFLOAD),
        _moving(table, Kind.RELOAD, back, anchor, InsertionOrder.RELOAD),
    ]


def _of_chosen(table: Table, compute: Ints, offload: Offload, kinds: tuple[Kind, ...]) -> Ints:
    """Places among the compute rows of the chosen units' rows of some kinds, by stage, micro-batch and unit."""
    chosen: Mask = np.zeros((table.num_stages, max(table.header.units_per_stage)), dtype=np.bool_)
    for stage, own in enumerate(offload.units):
        chosen[stage, list(own)] = True
    positions = np.flatnonzero(table.is_kind(*kinds)[compute] & chosen[table.stage[compute], table.unit[compute]])
    ordered: Ints = positions[np.argsort(unit_places(table)[compute[positions]])]
    return ordered


def _moving(table: Table, kind: Kind, rows: Ints, anchor: Ints, place: InsertionOrder) -> Insertion:
    moved = rows_of(kind, table.stage[rows], table.microbatch[rows], unit=table.unit[rows])
    return Insertion(moved, anchor, place, table.section[anchor])


def around_updates(insertion: Insertion) -> Insertion:
    """The same rows, each update with its unit's state reloaded ahead, behind the start of the update before it, and
    offloaded behind; rows that are no updates stay as they are."""
    rows, anchor = insertion.rows, insertion.anchor
    if len(rows) == 0 or rows[0, KIND] != Kind.UPDATE:
        return insertion
    index = np.arange(len(rows))
    opens = np.append(True, (np.diff(anchor) != 0) | (np.diff(rows[:, MICROBATCH]) != 0))
    first = np.maximum.accumulate(np.where(opens, index, 0))
    reload, offload = rows.copy(), rows.copy()
    reload[:, KIND], offload[:, KIND] = Kind.RELOAD, Kind.OFFLOAD
    order = np.argsort(np.concatenate([3 * np.maximum(index - 1, first), 3 * index + 1, 3 * index + 2]), kind="stable")
    thrice = np.tile(index, 3)[order]
    return replace(
        insertion,
        rows=np.concatenate([reload, rows, offload])[order],
        anchor=anchor[thrice],
        section=insertion.section[thrice],
    )
