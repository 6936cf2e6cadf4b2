"""Orders in a V that repeat one building block: each micro-batch as the one before it, six units of time later.

A unit is the time of one chunk's forward, input half or weight half. The block fixes when every rank starts the
forwards and input halves of a micro-batch, so it also fixes how long activations live and how many are held at most.
Weight halves take the free time (Qi et al., arXiv 2405.15362, sections 2 and 3).
"""

from collections.abc import Callable

from megapipe.schedules.building_blocks import Step, Times, fill_idle_time, rows_from_steps, v_shape
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT
from megapipe.schedules.schedule import Sections

PERIOD = 6
"""Two chunks' forwards, input halves and weight halves."""

Block = tuple[int, int, int, int]
"""When a rank starts micro-batch 0: the forward on the way down, that on the way up, and their input halves, last
chunk first."""


def repeated(
    num_ranks: int, num_microbatches: int, block: Callable[[int], Block], most_held: int, times: Times | None
) -> Sections:
    """Return the order of a building block, run as early as possible. most_held: chunks that a rank may hold."""
    programs = tuple(_program(rank, num_ranks, num_microbatches, block(rank)) for rank in range(num_ranks))
    timed = fill_idle_time(programs, v_shape(num_ranks, 2), times or Times(), None, most_held)
    return Sections.flushing(tuple(map(rows_from_steps, timed.programs)))


def _program(rank: int, num_ranks: int, count: int, block: Block) -> list[Step]:
    """Return a rank's forwards and input halves in the order in which they start."""
    down, up = rank, 2 * num_ranks - 1 - rank
    actions = zip(block, ((FORWARD, down), (FORWARD, up), (INPUT, up), (INPUT, down)), strict=True)
    starts = [(start + PERIOD * k, kind, stage, k) for start, (kind, stage) in actions for k in range(count)]
    return [(kind, stage, microbatch) for _, kind, stage, microbatch in sorted(starts)]
