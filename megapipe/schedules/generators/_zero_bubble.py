"""Orders with split backwards, whose weight halves wait and fill the time that the pipeline would idle.

ZB-H1 and ZB-H2 share `one_stage`, a 1F1B: the input half sends its gradient on at once; the weight halves of a stage
run in micro-batch order, so gradients are summed in the order of one process (Qi et al., arXiv 2401.10241).

Orders in a V repeat a `BuildingBlock`: each micro-batch as the one before it, six units of time later. A unit is the
time of one chunk's forward, input half or weight half. The block fixes when every rank starts the forwards and input
halves of a micro-batch, so it also fixes how long activations live and how many are held at most. Weight halves take
the free time (Qi et al., arXiv 2405.15362, sections 2 and 3).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import Step, Timed, Times, cheapest, fill_idle_time, v_shape
from megapipe.schedules.schedule import Sections

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def numbered(actions: Iterable[tuple[Kind, int]]) -> list[Step]:
    """Return actions of (kind, stage) with their micro-batches: each kind and stage counts its own."""
    microbatches: defaultdict[tuple[Kind, int], itertools.count[int]] = defaultdict(itertools.count)
    return [(*action, next(microbatches[action])) for action in actions]


def one_stage(rank: int, count: int, warmup: int, waiting: int, drain_one_by_one: bool) -> list[Step]:
    """Return ``warmup`` forwards, then forwards and input halves in turn, with at most ``waiting`` weight halves left.

    In the drain, each input half is followed by one weight half where ``drain_one_by_one``, else only by those above
    ``waiting``; the rest comes last.
    """
    steps = [(FORWARD, rank, microbatch) for microbatch in range(min(warmup, count))]
    done = 0
    for microbatch in range(count):
        draining = warmup + microbatch >= count
        if not draining:
            steps.append((FORWARD, rank, warmup + microbatch))
        steps.append((INPUT, rank, microbatch))
        if microbatch + 1 - done > (0 if draining and drain_one_by_one else waiting):
            steps.append((WEIGHT, rank, done))
            done += 1
    return steps + [(WEIGHT, rank, microbatch) for microbatch in range(done, count)]


PERIOD = 6
"""Two chunks' forwards, input halves and weight halves."""


class BuildingBlock(NamedTuple):
    """The starts of micro-batch 0 on each rank, in units.

    down: from the start on a rank to that on the next one, on the way down, for forwards and for input halves. up: the
    same on the way up. turns: free units where the micro-batch turns, between its forwards, after them, and between
    its input halves.
    """

    down: int
    up: int
    turns: tuple[int, int, int]

    def starts(self, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """Return the starts of the forward down, the forward up, and the input halves in their order."""
        ranks_after, way = num_ranks - 1 - rank, num_ranks - 1
        first = self.down * way + 1 + self.turns[0]
        half = first + self.up * way + 1 + self.turns[1]
        last = half + self.down * way + 1 + self.turns[2]
        return self.down * rank, first + self.up * ranks_after, half + self.down * rank, last + self.up * ranks_after

    def repeats(self, num_ranks: int) -> bool:
        """Return whether no two actions of any micro-batches start at the same time on a rank."""
        starts = (self.starts(rank, num_ranks) for rank in range(num_ranks))
        return all(len({each % PERIOD for each in mine}) == len(mine) for mine in starts)


def filled(num_ranks: int, num_microbatches: int, block: BuildingBlock, most_held: int, times: Times) -> Timed:
    """Return the order of a block, run as early as possible. most_held: chunks that a rank may hold."""
    programs = tuple(_program(rank, num_ranks, num_microbatches, block) for rank in range(num_ranks))
    return fill_idle_time(programs, v_shape(num_ranks, 2), times, None, most_held)


def repeated(num_ranks: int, num_microbatches: int, block: BuildingBlock, most_held: int, times: Times) -> Sections:
    """Return the order of a block as a schedule."""
    return cheapest([filled(num_ranks, num_microbatches, block, most_held, times)])


def _program(rank: int, num_ranks: int, count: int, block: BuildingBlock) -> list[Step]:
    """Return a rank's forwards and input halves in the order in which they start."""
    down, up = rank, 2 * num_ranks - 1 - rank
    actions = zip(
        block.starts(rank, num_ranks), ((FORWARD, down), (FORWARD, up), (INPUT, up), (INPUT, down)), strict=True
    )
    starts = [(start + PERIOD * k, kind, stage, k) for start, (kind, stage) in actions for k in range(count)]
    return [(kind, stage, microbatch) for _, kind, stage, microbatch in sorted(starts)]
