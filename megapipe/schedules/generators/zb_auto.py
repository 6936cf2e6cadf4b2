"""The automatic zero-bubble schedule: greedy orders under a memory limit, the cheapest of a few rules of thumb."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import (
    EQUAL_TIMES,
    ROUNDING,
    Step,
    Timed,
    Times,
    cheapest,
    fill_idle_time,
    linear,
    most_held,
    ready_time,
    steps_of,
)
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators._zero_bubble import FORWARD, INPUT, WEIGHT
from megapipe.schedules.generators.zb_h1 import zb_h1
from megapipe.schedules.generators.zb_h2 import zb_h2
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


class Rules(NamedTuple):
    """One rule of thumb. late_first_backward: a forward may delay the first backward. forward_first: forwards run
    before backwards if both can start. overfill_gaps: weight halves run in gaps that are too short for them."""

    late_first_backward: bool
    forward_first: bool
    overfill_gaps: bool


@schedule("zb_auto", "A", splits=True)
def zb_auto(
    num_ranks: int, num_microbatches: int, *, memory_limit: float | None = None, times: Times = EQUAL_TIMES
) -> Sections:
    """The cheapest order found for given times and memory (the heuristic of arXiv 2401.10241, section 3.1).

    ``memory_limit`` is the maximum number of micro-batches that a rank holds between forward and weight half,
    ``num_ranks`` by default (that is 1F1B's memory). Eight greedy orders and the hand-made ones within the limit
    compete.
    """
    limit = float(num_ranks) if memory_limit is None else memory_limit
    if not 1 <= limit < math.inf:
        raise ScheduleError(
            f"memory_limit is {limit:g}; it must be a finite number of "
            "at least 1, because a rank holds at least one micro-batch"
        )
    return cheapest(_candidates(num_ranks, num_microbatches, int(limit), times))


def _candidates(num_ranks: int, num_microbatches: int, limit: int, times: Times) -> Iterator[Timed]:
    placement = linear(num_ranks, 1)
    for rules in product((False, True), repeat=3):
        programs = _Greedy(num_ranks, num_microbatches, limit, times, Rules(*rules)).programs()
        yield fill_idle_time(programs, placement, times, None)
    for sections in (zb_h1(num_ranks, num_microbatches), zb_h2(num_ranks, num_microbatches)):
        programs = tuple(map(steps_of, sections.body))
        if max(map(most_held, programs)) <= limit:
            yield fill_idle_time(programs, placement, times, None)


class _Greedy:
    """Orders in which each rank that is free takes the best action that it can start."""

    def __init__(self, num_ranks: int, count: int, limit: int, times: Times, rules: Rules) -> None:
        self._count, self._limit, self._times, self._rules = count, limit, times, rules
        self._stages = linear(num_ranks, 1).stages
        self._out: list[list[Step]] = [[] for _ in range(num_ranks)]
        self._done = [dict.fromkeys((FORWARD, INPUT, WEIGHT), 0) for _ in range(num_ranks)]
        self._clock = [0.0] * num_ranks
        self._ends: dict[Step, float] = {}

    def programs(self) -> tuple[list[Step], ...]:
        """Return every rank's order."""
        total = 3 * self._count
        choices = {rank: self._choose(rank) for rank in range(len(self._stages))}
        while choices:
            # The rank that is free first moves first, so that no rank decides on actions that have not happened yet.
            start, rank = min((start, rank) for rank, (start, _) in choices.items())
            kind = choices[rank][1]
            step = (kind, rank, self._done[rank][kind])
            self._clock[rank] = self._ends[step] = start + self._times.of(kind, 1)
            self._done[rank][kind] += 1
            self._out[rank].append(step)
            if len(self._out[rank]) == total:
                del choices[rank]
            for affected in choices.keys() & {rank - 1, rank, rank + 1}:
                choices[affected] = self._choose(affected)
        return tuple(self._out)

    def _choose(self, rank: int) -> tuple[float, Kind]:
        """Return the rank's next kind and the time at which it can start; infinity if all of its actions wait for
        other ranks."""
        clock, done = self._clock[rank], self._done[rank]
        forward, backward = self._forward_ready(rank), self._input_ready(rank)
        if self._held_back(rank, backward):
            forward = float("inf")
        forward, backward = max(clock, forward), max(clock, backward)
        first = (forward, FORWARD) if forward <= backward and self._rules.forward_first else (backward, INPUT)
        if first[1] == INPUT and forward < backward:
            first = (forward, FORWARD)
        if done[WEIGHT] < done[INPUT]:
            gap = first[0] - clock
            if gap >= self._times.backward_weight - ROUNDING or (gap > 0 and self._rules.overfill_gaps):
                return clock, WEIGHT
            if done[FORWARD] < self._count and self._full(rank) and self._input_ready(rank) > clock:
                return clock, WEIGHT
        return first

    def _full(self, rank: int) -> bool:
        return self._done[rank][FORWARD] - self._done[rank][WEIGHT] >= self._limit

    def _held_back(self, rank: int, backward: float) -> bool:
        """Return whether a forward must wait so that the first backward can start as soon as it arrives."""
        if self._rules.late_first_backward or self._done[rank][INPUT] > 0:
            return False
        return backward < self._clock[rank] + self._times.forward - ROUNDING

    def _forward_ready(self, rank: int) -> float:
        index = self._done[rank][FORWARD]
        if index >= self._count or self._full(rank):
            return float("inf")
        return ready_time((FORWARD, rank, index), self._ends, self._stages, self._times.latency)

    def _input_ready(self, rank: int) -> float:
        index = self._done[rank][INPUT]
        if index >= self._done[rank][FORWARD]:
            return float("inf")
        return ready_time((INPUT, rank, index), self._ends, self._stages, self._times.latency)
