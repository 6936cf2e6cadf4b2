"""Zero-bubble schedules: the backward's weight half waits and fills the time that the pipeline would idle.

All from Qi et al., arXiv 2401.10241. The input half sends its gradient on at once; the weight halves of a stage run in
micro-batch order, so gradients are summed as one process would.
"""

from collections.abc import Sequence

import numpy as np

from megapipe.schedules.actions import Kind, Rows, rows_of
from megapipe.schedules.schedule import Sections

Step = tuple[Kind, int, int]
"""Kind, stage, micro-batch."""

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def zb_h1(num_ranks: int, num_microbatches: int) -> Sections:
    """1F1B with late weight halves: a third of its bubble at the same activation memory (arXiv 2401.10241,
    section 2.1).

    Rank r keeps up to r weight halves waiting and runs them in the drain.
    """
    return _sections(
        [_one_stage(rank, num_microbatches, num_ranks - 1 - rank, rank, True) for rank in range(num_ranks)]
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Sections:
    """Twice the warm-up forwards and no bubble between them and the drain, for up to twice 1F1B's activation memory
    (arXiv 2401.10241, section 2.2)."""
    return _sections(
        [_one_stage(rank, num_microbatches, 2 * (num_ranks - 1 - rank), 2 * rank, False) for rank in range(num_ranks)]
    )


def _one_stage(rank: int, count: int, warmup: int, waiting: int, drain_one_by_one: bool) -> list[Step]:
    """``warmup`` forwards, then forward and input half in turn, at most ``waiting`` weight halves behind.

    In the drain each input half is followed by one weight half where ``drain_one_by_one``, else only by those above
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


def zb_v(num_ranks: int, num_microbatches: int) -> Sections:
    """Two stages a rank, placed in a V: no bubble at 1F1B's activation memory where forward, input half and weight
    half take equal time (the ZB-V schedule of arXiv 2401.10241).

    The order is made for at least ``2 * num_ranks - 1`` micro-batches; of fewer, those that are too many are left out.
    """
    padded = max(num_microbatches, 2 * num_ranks - 1)
    programs = [_v_order(rank, num_ranks, padded) for rank in range(num_ranks)]
    return _sections([[step for step in steps if step[2] < num_microbatches] for steps in programs])


def _v_order(rank: int, num_ranks: int, count: int) -> list[Step]:
    down, up = rank, 2 * num_ranks - 1 - rank
    ahead = num_ranks - rank
    order = _Counter()
    order.add((FORWARD, down), times=2 * ahead - 1)
    order.add((FORWARD, up), (FORWARD, down), times=rank)
    order.add((FORWARD, up), (INPUT, up), (WEIGHT, up), times=ahead)
    while order.count(FORWARD, up) < count:
        if order.count(FORWARD, down) < count:
            order.add((FORWARD, down))
        order.add((INPUT, down), (WEIGHT, down), (FORWARD, up), (INPUT, up), (WEIGHT, up))
    order.add((INPUT, down), (INPUT, up), times=rank)
    order.add((INPUT, down), (WEIGHT, down), times=ahead)
    order.add((WEIGHT, up), times=count - order.count(WEIGHT, up))
    order.add((WEIGHT, down), times=count - order.count(WEIGHT, down))
    return order.steps


class _Counter:
    """Steps in order, each kind and stage counting its own micro-batches."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._next: dict[tuple[Kind, int], int] = {}

    def count(self, kind: Kind, stage: int) -> int:
        return self._next.get((kind, stage), 0)

    def add(self, *group: tuple[Kind, int], times: int = 1) -> None:
        """Append the group so many times."""
        for _ in range(times):
            for kind, stage in group:
                self.steps.append((kind, stage, self.count(kind, stage)))
                self._next[kind, stage] = self.count(kind, stage) + 1


def _sections(programs: Sequence[list[Step]]) -> Sections:
    return Sections.flushing(tuple(rows_from_steps(steps) for steps in programs))


def rows_from_steps(steps: list[Step]) -> Rows:
    """Rows of (kind, stage, micro-batch) triples."""
    kind, stage, microbatch = np.array(steps, dtype=np.int64).reshape(-1, 3).T
    return rows_of(kind, stage, microbatch)
