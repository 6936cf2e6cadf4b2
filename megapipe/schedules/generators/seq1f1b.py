"""Seq1F1B: 1F1B over slices of sequences."""

from megapipe.schedules.building_blocks import in_groups, round_robin
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


@schedule("seq1f1b", "C", placement=round_robin)
def seq1f1b(num_ranks: int, num_microbatches: int, *, chunks: int, slices: int = 4) -> Sections:
    """1F1B whose unit is one of ``slices`` parts of a sequence: its bubble divided by their number, and far fewer
    activations (Seq1F1B, arXiv 2406.03488, section 3.2).

    A forward reads the keys and values of the slices before it, so slices run forward in their order and backward in
    the reverse. Rank r starts with p - r - 2 + s forwards of s slices. With ``chunks`` above 1 it is interleaved: all
    slices of the ceil(p / s) micro-batches of a group, g slices, pass a chunk in a row, and rank r starts with
    (v - 1) g + 2 (p - 1 - r) + s - 1 forwards of v chunks.
    """
    group_size, ahead = -(-num_ranks // slices), 1 if chunks == 1 else 2
    return Sections.flushing(
        in_groups(
            num_ranks, num_microbatches, chunks, group_size, rank, ahead=ahead * (num_ranks - 1 - rank), slices=slices
        )
        for rank in range(num_ranks)
    )
