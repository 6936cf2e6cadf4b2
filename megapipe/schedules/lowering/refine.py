"""Refining: a chunk's compute becomes its units' compute where a reduction can start inside it."""

from dataclasses import replace

import numpy as np

from megapipe.schedules.actions import UNIT, Kind
from megapipe.schedules.lowering.program import Program, last_row_per


def refine(program: Program) -> Program:
    """Cut each stage's last micro-batch of every update into units: forward ascending, backward descending.

    Forward and backward of one micro-batch keep one granularity, so that the engine cuts its graph between units.
    """
    header = program.header
    gradient_rows = np.flatnonzero(program.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    num_updates = int(program.update.max(initial=0)) + 1
    group = program.stage.astype(np.int64) * num_updates + program.update
    last = last_row_per(group[gradient_rows], gradient_rows, len(header.stages) * num_updates)
    cut = (last[group] >= 0) & (program.microbatch == program.microbatch[last[group]])

    copies = np.where(cut, program.units, 1)
    source = np.repeat(np.arange(len(copies)), copies)
    index = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    rows = program.rows[source]
    ascending = program.is_kind(Kind.FORWARD)[source]
    rows[:, UNIT] = np.where(cut[source], np.where(ascending, index, copies[source] - 1 - index), -1)
    return replace(program, rows=rows, rank=program.rank[source], section=program.section[source])
