"""ZB-H2: twice the warm-up of 1F1B, and no bubble."""

from megapipe.schedules.building_blocks import held_after_warmup, rows_from_steps
from megapipe.schedules.generators._zero_bubble import one_stage
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("zb_h2", "A", splits=True, repeats=True, held=held_after_warmup, search="promising")
def zb_h2(num_ranks: int, num_microbatches: int) -> Sections:
    """Twice the warm-up forwards and no bubble between them and the drain, for up to twice 1F1B's activation memory
    (arXiv 2401.10241, section 2.2)."""
    ranks = range(num_ranks)
    programs = [one_stage(rank, num_microbatches, 2 * (num_ranks - 1 - rank), 2 * rank, False) for rank in ranks]
    return Sections.flushing(map(rows_from_steps, programs))
