"""The modular pipeline: all micro-batches pass a chunk before the next chunk starts."""

from megapipe.schedules.building_blocks import held_after_all_forwards, in_groups, round_robin
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule(
    "modular",
    "A",
    placement=round_robin,
    chunks=2,
    takes_two_bp=True,
    held=held_after_all_forwards,
    search="promising",
    paper="arXiv 2106.02679",
)
def modular(num_ranks: int, num_microbatches: int, *, chunks: int) -> Sections:
    """All micro-batches through a chunk before the next chunk: layered gradient accumulation in a pipeline
    (arXiv 2106.02679; as breadth-first pipeline parallelism arXiv 2211.05953).

    A chunk's gradient is complete after one run of backwards, so its reduction overlaps all that follow, and sharded
    weights are gathered once a pass whatever the number of micro-batches. Every activation is kept.
    """
    return Sections.flushing(
        in_groups(num_ranks, num_microbatches, chunks, num_microbatches, rank, ahead=num_microbatches)
        for rank in range(num_ranks)
    )
