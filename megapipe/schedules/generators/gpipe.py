"""GPipe: all forwards, then all backwards."""

from typing import Final

from megapipe.schedules.building_blocks import held_after_all_forwards, one_stage_file
from megapipe.schedules.generators.modular import modular
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections

ROWS: Final = """\
  for i in 0..m: F{r}.{i}
  for i in 0..m: B{r}.{i}
"""


@schedule("gpipe", "A", takes_two_bp=True, held=held_after_all_forwards, text=one_stage_file("gpipe", ROWS))
def gpipe(num_ranks: int, num_microbatches: int) -> Sections:
    """All forwards, then all backwards; every activation is kept (GPipe, arXiv 1811.06965, section 2.3).

    Backwards run in micro-batch order, so that gradients are summed in the order of a one-process run.
    """
    return modular(num_ranks, num_microbatches, chunks=1)
