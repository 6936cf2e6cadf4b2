"""Refining: a chunk's compute becomes its units' compute where a gather or reduction can start inside it."""

from dataclasses import replace

import numpy as np

from megapipe.schedules.actions import GROUP, UNIT, Kind
from megapipe.schedules.table import Table, last_row_per


def refine(table: Table, *, everywhere: bool) -> Table:
    """Cut each stage's last micro-batch of every update into units: forward ascending, backward descending.

    ``everywhere``: all micro-batches.

    Forward and backward of one micro-batch keep one granularity, so that the engine cuts its graph between units. The
    rows of a group are cut together: their first units are a group, their second ones, and so on.
    """
    adding = table.rows_with(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    group = table.stage * table.num_updates + table.update
    last = last_row_per(group[adding], adding, table.num_stages * table.num_updates)
    cut = (last[group] >= 0) & (table.microbatch == table.microbatch[last[group]])
    cut |= everywhere

    copies = np.where(cut, table.units, 1)
    source = np.repeat(np.arange(len(copies)), copies)
    index = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    order = np.lexsort((source, index, table.action_first[source]))
    source, index = source[order], index[order]
    rows = table.rows[source]
    ascending = table.is_kind(Kind.FORWARD)[source]
    rows[:, UNIT] = np.where(cut[source], np.where(ascending, index, copies[source] - 1 - index), -1)
    place = table.action_first[source] * (copies.max(initial=1) + 1) + index
    rows[:, GROUP] = np.where(table.group[source] >= 0, place, -1)
    return replace(table, rows=rows, rank=table.rank[source], section=table.section[source])


def number_groups(table: Table) -> Table:
    """Number the groups of each rank from 0 in every section; one row does not make a group."""
    if not (table.group >= 0).any():
        return table
    opens = (table.action_first < table.action_last) & (table.action_first == np.arange(len(table.rows)))
    counted = np.cumsum(opens)
    key = table.rank * table.num_sections + table.section
    before = counted[np.searchsorted(key, key)] - opens[np.searchsorted(key, key)]
    rows = table.rows.copy()
    joined = table.action_first < table.action_last
    rows[:, GROUP] = np.where(joined, counted - before - 1, -1)
    return replace(table, rows=rows)
