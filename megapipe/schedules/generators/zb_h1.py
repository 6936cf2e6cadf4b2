"""ZB-H1: weight halves fill the drain of 1F1B."""

from typing import Final

from megapipe.schedules.building_blocks import held_after_warmup, one_stage_file, rows_from_steps
from megapipe.schedules.generators._zero_bubble import one_stage
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections

ROWS: Final = """\
  let w = min(p-1-r, m)                # forwards before the first backward
  let n = max(m-w-r, 0)                # weight halves before the drain
  for i in 0..w: F{r}.{i}
  for i in w..m:
    F{r}.{i} BI{r}.{i-w}
    if i-w >= r: BW{r}.{i-w-r}
  for i in 0..w: BI{r}.{m-w+i} BW{r}.{n+i}
  for i in n+w..m: BW{r}.{i}
"""


@schedule(
    "zb_h1", "A", splits=True, repeats=True, held=held_after_warmup, search="promising",
    text=one_stage_file("zb_h1", ROWS),
)  # fmt: skip
def zb_h1(num_ranks: int, num_microbatches: int) -> Sections:
    """1F1B with late weight halves: a third of its bubble at the same activation memory (arXiv 2401.10241,
    section 2.1).

    Rank r keeps up to r weight halves waiting and runs them in the drain.
    """
    programs = [one_stage(rank, num_microbatches, num_ranks - 1 - rank, rank, True) for rank in range(num_ranks)]
    return Sections.flushing(map(rows_from_steps, programs))
