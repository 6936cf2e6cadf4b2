"""GIS-H: grouped interleaving in the smallest groups."""

from megapipe.schedules.building_blocks import round_robin
from megapipe.schedules.generators.gis import gis
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("gis_h", "A", placement=round_robin, chunks=2, splits=True)
def gis_h(num_ranks: int, num_microbatches: int, *, chunks: int) -> Sections:
    """GIS in groups of half the ranks: with v chunks (v + 1) / 2v of 1F1B's activation memory, for a larger bubble
    (GIS-H of PipeOffload, arXiv 2503.01328, section 3.2)."""
    return gis(num_ranks, num_microbatches, chunks=chunks, group_size=-(-num_ranks // 2))
