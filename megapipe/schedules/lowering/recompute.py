"""Adding recomputation: forwards that keep their input alone, and run again right before their backward.

Chen et al. 2016, 1604.06174 section 4 (a span's input is kept, its inside is computed again); in a pipeline GPipe,
1811.06965 section 2.3.
"""

from collections.abc import Sequence

import numpy as np

from megapipe.schedules.actions import MICROBATCH, STAGE, VERSION, Ints, Kind, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering.insertion import Insertion, InsertionOrder
from megapipe.schedules.schedule import Header
from megapipe.schedules.table import Table

Spans = Sequence[Sequence[range]]
"""Per stage, runs of neighbouring units that are computed again together, from the input of the first."""


def check_spans(header: Header, spans: Spans) -> None:
    """Raise ScheduleError unless each stage's spans are ascending, apart, and made of its units."""
    if len(spans) != len(header.stages):
        raise ScheduleError(f"recompute has spans for {len(spans)} stages, but there are {len(header.stages)}")
    for stage, (units, own) in enumerate(zip(header.units_per_stage, spans, strict=True)):
        free = 0
        for span in own:
            if span.step != 1 or not free <= span.start < span.stop <= units:
                raise ScheduleError(
                    f"recompute of stage {stage}: {span} must be one or more consecutive units from 0 to {units - 1}, "
                    "after the previous span"
                )
            free = span.stop


def add_recompute(table: Table, spans: Spans) -> Insertion:
    """Each span's forwards again, ascending, ahead of the backward of its last unit; ``table`` is cut into units."""
    most = max(table.header.units_per_stage)
    first = np.full((table.num_stages, most), -1, dtype=np.int64)
    for stage, own in enumerate(spans):
        for span in own:
            first[stage, span.stop - 1] = span.start
    backwards = table.rows_with(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    start = first[table.stage[backwards], table.unit[backwards]]
    backwards, start = backwards[start >= 0], start[start >= 0]
    length = table.unit[backwards] - start + 1
    anchor: Ints = np.repeat(backwards, length)
    within = np.arange(len(anchor)) - np.repeat(np.cumsum(length) - length, length)
    rows = rows_of(
        Kind.RECOMPUTE,
        table.rows[anchor, STAGE],
        table.rows[anchor, MICROBATCH],
        unit=np.repeat(start, length) + within,
        version=table.rows[anchor, VERSION],
    )
    return Insertion(rows, anchor, InsertionOrder.RECOMPUTE, table.section[anchor])
