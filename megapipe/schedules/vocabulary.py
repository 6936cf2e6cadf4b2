"""Orders whose output layer and input embedding are sharded over all pipeline ranks ("Balancing Pipeline Parallelism
with Vocabulary Parallelism", arXiv 2411.05288, sections 4 and 5).

Every rank gets two more stages, which no route passes (`Header.vocabulary`). One is a shard of the output layer. Its
forward needs the output of the route's last stage, and computes logits and their statistics; its backward needs the
statistics of all ranks; the backward of the route's last stage needs the backwards of all shards. The other is a shard
of the input embedding. Its forward looks up the rows that the rank has, and the forward of the route's first stage
needs the sum over all ranks; its backward needs the backward of the first stage.

Variant 1 is the paper's algorithm 1 ("Vocab-1"): forward and backward are its S and T passes, with two barriers. In
variant 2, algorithm 2 ("Vocab-2"), the forward also multiplies the softmax of the rank's own columns by the matrix.
The backward is split: its input half takes next to no time, rescales that product, and starts the sum over all ranks;
the weight half is the T pass, which no rank waits for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np

from megapipe.schedules.actions import GROUP, KIND, MICROBATCH, STAGE, Action, Ints, Kind, Rows
from megapipe.schedules.building_blocks import EQUAL_TIMES
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Header, Schedule, Sections, StagePlace

PASSES: Final = {1: (Kind.BACKWARD,), 2: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
"""A shard's backward, by the variant."""
BARRIERS: Final = {1: 2, 2: 1}
"""Maximum number of micro-batches by which backwards are delayed: one for each barrier (section 5.1: 1F1B keeps p + 2
or p + 1 micro-batches)."""
PASS_SECONDS: Final = 0.25
"""Time of a pass of a shard of the output layer, where the forward of all layers of a rank takes 1. These times
decide the places of passes. Those of the input embedding, which read a few rows, take no time."""
COLLECTIVE_SECONDS: Final = 0.25
"""Time from the last rank's pass to the result of its collective, in the same unit, for which an order has to leave
room: one that is only just in time without it would wait in every micro-batch on a real network."""
COMPARED: Final = 3
"""Times the number of ranks: micro-batches on which orders are compared."""
LOOKED_UP: Final = 2
"""Micro-batches whose embeddings are summed before the first stage needs them: one repeating interval before their
turn."""
OUTPUT, OUTPUT_BACKWARD, INPUT, INPUT_BACKWARD = range(4)
"""Kinds of passes, in the order of their precedence."""


def vocabulary_shards(num_routed: int, num_ranks: int) -> tuple[StagePlace, ...]:
    """Return the places of the shards of an output layer, then those of an input embedding: stages after `num_routed`
    others, one on each rank in turn."""
    return tuple(StagePlace(num_routed + shard, 0, shard % num_ranks) for shard in range(2 * num_ranks))


def with_vocabulary(schedule: Schedule, variant: int) -> Schedule:
    """Return a schedule of compute actions with the passes of the shards of the vocabulary, which its header names.

    variant: a key of `PASSES`. Forwards run earlier by the number of micro-batches that hides the collectives, at most
    the number of its barriers. The passes take the first free time on each rank, in one order on all of them. Raises
    ScheduleError for a schedule that never flushes, has several routes, slices or overlapped pairs, or whose order
    leaves no time for the passes.
    """
    header, body = schedule.header, schedule.sections.body
    for wrong, what in (
        (not schedule.flushes, "never flushes"),
        (len(header.routes) > 1, "has several routes"),
        (header.slices > 1, "passes slices of sequences"),
        (any((rows[:, GROUP] >= 0).any() for rows in body), "overlaps forwards with backwards"),
    ):
        if wrong:
            raise ScheduleError(
                f"{header.name} {what}, so its output layer cannot be sharded over pipeline "
                "ranks; set parallel.vocabulary tensor, or use a schedule such as 1f1b"
            )
    kinds = (Kind.FORWARD,), PASSES[variant], (Kind.FORWARD,), (Kind.BACKWARD,)

    def placed(rows: Sequence[Rows], collective: float = 0.0) -> _PassPlacement:
        return _PassPlacement(Schedule(header, Sections.flushing(tuple(rows))), kinds, collective)

    def makespan_of_first(rows: Sequence[Rows]) -> float:
        few = [each[each[:, MICROBATCH] < COMPARED * header.num_ranks] for each in rows]
        return round(placed(few, COLLECTIVE_SECONDS).makespan, 6)

    *ahead_orders, delayed_order = orders = _orders(header, body, BARRIERS[variant])
    chosen = min(orders, key=makespan_of_first) if ahead_orders else delayed_order
    placements = [placed(each) for each in ((chosen, delayed_order) if chosen is not delayed_order else (chosen,))]
    best = min(placements, key=lambda each: round(each.makespan, 6))
    if best.makespan == inf:
        raise ScheduleError(
            f"{header.name} leaves no time for the passes of an output layer that is sharded over pipeline ranks; set "
            "parallel.vocabulary tensor, or use a schedule such as 1f1b"
        )
    return replace(schedule, sections=Sections.flushing(best.rows()))


def _orders(header: Header, body: Sequence[Rows], most: int) -> list[tuple[Rows, ...]]:
    """Return orders that leave time for barriers: with forwards of more and more whole micro-batches before the first
    backward, and last the one in which each backward comes after the same number of further forwards.

    most: number of additional micro-batches that a rank may hold.
    """
    numbers = range(most + 1) if header.mode == "train" else ()
    orders = [tuple(_ahead(rows, number) for rows in body) for number in numbers]
    last = tuple(_delayed(rows, most * (len(header.stages_on(rank)) - 2)) for rank, rows in enumerate(body))
    different = [each for each in orders if not all(map(np.array_equal, each, last))]
    return [*different, last]


def _ahead(rows: Rows, number: int) -> Rows:
    """Return a rank's rows with the forwards of ``number`` more whole micro-batches before the first backward, in turn
    on its stages. Later forwards are of micro-batches that come that much later."""
    forward = rows[:, KIND] == Kind.FORWARD
    first = int(np.argmin(forward))
    stages = sorted({*rows[forward, STAGE].tolist()}, key=lambda stage: (stage == rows[first - 1, STAGE], stage))
    added = np.repeat(rows[:1], number * len(stages), axis=0)
    added[:, STAGE] = stages * number
    moved, kept = np.concatenate([rows[:first], added, rows[first:]]), []
    for stage in stages:
        places = np.flatnonzero((moved[:, KIND] == Kind.FORWARD) & (moved[:, STAGE] == stage))
        microbatches = rows[forward & (rows[:, STAGE] == stage), MICROBATCH]
        kept.append(places[: len(microbatches)])
        moved[kept[-1], MICROBATCH] = microbatches
    reordered: Rows = moved[np.sort(np.concatenate([*kept, np.flatnonzero(moved[:, KIND] != Kind.FORWARD)]))]
    return reordered


def _delayed(rows: Rows, delay: int) -> Rows:
    """Return a rank's rows with each backward after `delay` more forwards of its stages."""
    forward = rows[:, KIND] == Kind.FORWARD
    before = np.cumsum(forward) - forward
    late = np.minimum(before + delay, forward.sum())
    order: Ints = np.lexsort((forward, np.where(forward, before, late)))
    return rows[order]


Event = tuple[int, int, int]
"""Direction (0 forward, 1 backward or input half), stage, and micro-batch. The stage of passes of all shards
together is `ALL_OUTPUTS` or `ALL_INPUTS`."""
ALL_OUTPUTS, ALL_INPUTS = -1, -2


@dataclass
class _RankState:
    """Progress of a rank through its own rows and the passes.

    rows: each with the event that it needs, the event that it is, and its seconds. shards: the rank's own shard of the
    output layer, and of the input embedding. emitted: rows that the rank has run. done: how many of `rows` are among
    them. passed: the number of passes among them. first_start: start of the first of `rows`. version: number of its
    latest offer.
    """

    rows: list[tuple[list[int], Event | None, Event, float]]
    shards: tuple[int, int]
    emitted: list[list[int]] = field(default_factory=list)
    done: int = 0
    passed: int = 0
    first_start: float = 0.0
    free: float = 0.0
    version: int = 0


class _PassPlacement:
    """Runs the ranks' rows in time, and each pass of a shard as soon as its rank is free.

    All ranks have one order of passes. A forward starts when all ranks have ended the pass before it, because its
    broadcast comes after their collectives; a backward when all have ended its forward. The first rank that is free
    decides which pass is next: a forward if one can start, otherwise the oldest backward.

    Passes of the input embedding follow passes of the output layer directly, but for the weight half of a split
    backward, so that the next pass does not wait for them. They come by themselves before the first pass of the output
    layer, after the last one, and where the first stage waits.

    passes: kind and micro-batch of each, with those that follow it directly, in their order; with the ranks that have
    not run it, and its end. collective: seconds from the end of a pass to its result.
    """

    def __init__(self, schedule: Schedule, kinds: Sequence[tuple[Kind, ...]], collective: float) -> None:
        header, self._collective = schedule.header, collective
        training = header.mode == "train"
        self._kinds = dict(enumerate(kinds)) if training else {each: kinds[each] for each in (OUTPUT, INPUT)}
        self._first, self._last = header.routes[0][0], header.routes[0][-1]
        self._count = header.num_microbatches
        before, after = ({two[1 - side]: two[side] for two in pairwise(header.routes[0])} for side in (0, 1))
        self._states = []
        for rank, rows in enumerate(schedule.sections.body):
            rank_rows: list[tuple[list[int], Event | None, Event, float]] = []
            for row in rows.tolist():
                kind, stage, microbatch = Kind(row[KIND]), row[STAGE], row[MICROBATCH]
                way = {Kind.FORWARD: 0, Kind.BACKWARD_WEIGHT: 2}.get(kind, 1)
                neighbours = before.get(stage, ALL_INPUTS), after.get(stage, ALL_OUTPUTS)
                needed = (way, neighbours[way], microbatch) if way < 2 else None
                seconds = EQUAL_TIMES.of(kind, header.stages_sharing[stage])
                rank_rows.append((row, needed, (way, stage, microbatch), seconds))
            self._states.append(_RankState(rank_rows, (header.outputs[rank], header.inputs[rank])))
        self._heap: list[tuple[float, bool, int, int]] = []
        self._ended: dict[Event, float] = {}
        self._waiting: dict[Event, int] = {}
        self._started = dict.fromkeys(self._kinds, 0)
        self._passes: list[list[tuple[int, int]]] = []
        self._left: list[int] = []
        self._ends: list[float] = []
        self._run()

    def _run(self) -> None:
        for rank in range(len(self._states)):
            self._offer(rank)
        while self._heap:
            start, is_own, rank, version = heappop(self._heap)
            if version == self._states[rank].version:
                (self._run_own if is_own else self._run_pass)(rank, start)

    @property
    def makespan(self) -> float:
        """Longest time on any one rank from the start of its first own row to its end; inf if ranks wait for one
        another."""
        done = all(state.done == len(state.rows) for state in self._states)
        return max(state.free - state.first_start for state in self._states) if done else inf

    def rows(self) -> Iterator[Rows]:
        """Yield each rank's rows with the passes."""
        yield from (np.array(state.emitted, dtype=np.int32) for state in self._states)

    def _offer(self, rank: int) -> None:
        """Choose what a rank runs next, its own row or a pass, and push it on the heap with its start."""
        state = self._states[rank]
        state.version += 1
        options = []
        if (next_pass := self._next_pass(state)) is not None:
            options.append((next_pass[0], False))
        if state.done < len(state.rows):
            needed = state.rows[state.done][1]
            ended = 0.0 if needed is None else self._ended.get(needed)
            if ended is not None:
                options.append((max(ended, state.free), True))
            elif needed is not None:
                self._waiting[needed] = rank
        if options:
            heappush(self._heap, (*min(options), rank, state.version))

    def _next_pass(self, state: _RankState) -> tuple[float, int, int] | None:
        """Return when a rank can start its next pass, the pass's kind and its micro-batch; None if it cannot."""
        number, candidates = state.passed, []
        before = self._ends[number - 1] if number else 0.0
        decided = [each[0] for each in self._passes[number : number + 1]]
        for kind, microbatch in decided or self._startable(state):
            ready = self._ready(kind, microbatch)
            if ready is None or (kind == OUTPUT and number and self._left[number - 1]):
                continue
            candidates.append((max(state.free, ready, before if kind == OUTPUT else 0.0), kind, microbatch))
        return min(candidates, default=None)

    def _startable(self, state: _RankState) -> Iterator[tuple[int, int]]:
        """Yield the passes, by kind and micro-batch, that a rank may choose as the next one."""
        started = [self._started[kind] for kind in self._kinds if kind < INPUT]
        alone = max(started) == 0 or min(started) == self._count
        for kind, microbatch in self._started.items():
            waits = state.done < len(state.rows) and state.rows[state.done][1] == (0, ALL_INPUTS, microbatch)
            if kind < INPUT or alone or (kind == INPUT and waits):
                yield kind, microbatch

    def _ready(self, kind: int, microbatch: int) -> float | None:
        """Return when the event that a pass needs has ended; None if it has not, or if there is no such pass."""
        if kind == INPUT and microbatch < min(LOOKED_UP, self._count):
            return 0.0
        needed = {
            OUTPUT: (0, self._last, microbatch),
            OUTPUT_BACKWARD: (0, ALL_OUTPUTS, microbatch),
            INPUT: (0, self._first, microbatch - LOOKED_UP),
            INPUT_BACKWARD: (1, self._first, microbatch),
        }
        return self._ended.get(needed[kind]) if microbatch < self._count else None

    def _decide(self, kind: int, microbatch: int, start: float) -> None:
        """Let a pass be the next one on all ranks, together with those of the input embedding that can start too."""
        self._passes.append([(kind, microbatch)])
        self._left.append(len(self._states))
        self._ends.append(0.0)
        self._started[kind] += 1
        for other in self._started if kind < INPUT else ():
            ready = self._ready(other, self._started[other])
            if other >= INPUT and ready is not None and ready <= start:
                self._passes[-1].append((other, self._started[other]))
                self._started[other] += 1

    def _run_pass(self, rank: int, start: float) -> None:
        state = self._states[rank]
        next_pass = self._next_pass(state)
        if next_pass is None or next_pass[0] > start:  # another rank decided on a later pass
            self._offer(rank)
            return
        _, kind, microbatch = next_pass
        number, kinds = state.passed, self._kinds[kind]
        if number == len(self._passes):
            self._decide(kind, microbatch, start)
        together = [
            Action(self._kinds[each][0], state.shards[each >= INPUT], microbatch=of)
            for each, of in self._passes[number]
        ]
        together += [Action(each, state.shards[0], microbatch=microbatch) for each in kinds[1:]]
        state.emitted += map(list, together)
        state.passed += 1
        state.free = start + PASS_SECONDS * (kind < INPUT)
        self._ends[number] = max(self._ends[number], start if len(kinds) > 1 else state.free)
        self._left[number] -= 1
        for each, of in () if self._left[number] else self._passes[number]:
            event = each % INPUT, ALL_INPUTS if each >= INPUT else ALL_OUTPUTS, of
            self._end(event, self._ends[number] + self._collective)
        for other in (rank,) if self._left[number] else range(len(self._states)):
            self._offer(other)

    def _run_own(self, rank: int, start: float) -> None:
        state = self._states[rank]
        row, _, event, seconds = state.rows[state.done]
        state.emitted.append(row)
        state.first_start = state.first_start if state.done else start
        state.done += 1
        state.free = start + seconds
        self._offer(rank)
        self._end(event, state.free)
        if event[:2] in ((0, self._last), (0, self._first), (1, self._first)):
            for other in range(len(self._states)):
                self._offer(other)

    def _end(self, event: Event, time: float) -> None:
        self._ended[event] = time
        if event in self._waiting:
            self._offer(self._waiting.pop(event))
