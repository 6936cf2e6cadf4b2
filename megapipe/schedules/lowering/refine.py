"""Refining: a chunk's compute becomes its units' compute where a gather or reduction can start inside it."""

from dataclasses import replace

import numpy as np

from megapipe.schedules.actions import UNIT, Kind
from megapipe.schedules.table import Table, last_row_per


def refine(table: Table, *, everywhere: bool) -> Table:
    """Cut each stage's last micro-batch of every update into units: forward ascending, backward descending.

    ``everywhere``: all micro-batches.

    Forward and backward of one micro-batch keep one granularity, so that the engine cuts its graph between units.
    """
    adding = table.rows_with(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    group = table.stage * table.num_updates + table.update
    last = last_row_per(group[adding], adding, table.num_stages * table.num_updates)
    cut = (last[group] >= 0) & (table.microbatch == table.microbatch[last[group]])
    cut |= everywhere

    copies = np.where(cut, table.units, 1)
    source = np.repeat(np.arange(len(copies)), copies)
    index = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    rows = table.rows[source]
    ascending = table.is_kind(Kind.FORWARD)[source]
    rows[:, UNIT] = np.where(cut[source], np.where(ascending, index, copies[source] - 1 - index), -1)
    return replace(table, rows=rows, rank=table.rank[source], section=table.section[source])
