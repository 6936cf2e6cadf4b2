"""1F1B: one forward, one backward."""

from typing import Final

from megapipe.schedules.building_blocks import held_after_warmup, in_groups, one_stage_file
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections

ROWS: Final = """\
  let w = min(p-1-r, m)                # forwards before the first backward
  for i in 0..w: F{r}.{i}
  for i in w..m: F{r}.{i} B{r}.{i-w}
  for i in m-w..m: B{r}.{i}
"""


@schedule(
    "1f1b", "A", takes_two_bp=True, repeats=True, looped="interleaved_1f1b", held=held_after_warmup, search="all",
    text=one_stage_file("1f1b", ROWS),
)  # fmt: skip
def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Sections:
    """One forward, one backward: at most ``num_ranks - rank`` activations are kept (PipeDream-Flush, arXiv 2006.09503,
    section 3.2; Megatron-LM, arXiv 2104.04473, section 2.2)."""
    return Sections.flushing(
        in_groups(num_ranks, num_microbatches, 1, num_microbatches, rank, ahead=num_ranks - 1 - rank)
        for rank in range(num_ranks)
    )
