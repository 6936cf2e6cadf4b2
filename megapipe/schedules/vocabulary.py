"""Orders whose output layer is sharded over all pipeline ranks ("Balancing Pipeline Parallelism with Vocabulary
Parallelism", arXiv 2411.05288, section 4).

Every rank gets one more stage, which no route passes: a shard of the output layer (`Header.vocabulary`). The forward
of a shard needs the output of the route's last stage, and computes logits and their statistics; its backward needs the
statistics of all ranks; the backward of the route's last stage needs the backwards of all shards. These are the S and
T passes of the paper's algorithm 1 ("Vocab-1"), with one barrier between them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from megapipe.schedules.actions import GROUP, KIND, MICROBATCH, STAGE, Ints, Kind, Rows, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Schedule, Sections, StagePlace

DELAY: Final = 2
"""Micro-batches by which backwards are delayed, one for each barrier (section 5.1: 1F1B keeps p + 2 micro-batches)."""
SECONDS: Final = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
PASS_SECONDS: Final = 0.25
"""Time of a pass of a shard, where the forward of all layers of a rank takes 1: by these times passes are placed."""


_NEVER: Final[tuple[float, bool, list[int]]] = (np.inf, True, [])


def vocabulary_shards(num_routed: int, num_ranks: int) -> tuple[StagePlace, ...]:
    """Return the places of the shards of an output layer: stages after `num_routed` others, one on each rank."""
    return tuple(StagePlace(num_routed + rank, 0, rank) for rank in range(num_ranks))


def with_vocabulary(schedule: Schedule) -> Schedule:
    """Return a schedule of compute actions with the passes of the shards of the output layer, which its header names.

    Backwards are delayed by `DELAY` micro-batches; then the passes take the first free time on each rank, in one order
    on all of them. Raises ScheduleError for a schedule that never flushes, has several routes, slices or overlapped
    pairs, or whose order leaves no time for the passes.
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
                f"{header.name} {what}, so its output layer cannot be sharded over pipeline ranks; set "
                "parallel.vocabulary tensor, or use a schedule such as 1f1b"
            )
    rows = [_delayed(each, len(header.stages_on(rank)) - 1) for rank, each in enumerate(body)]
    placed = _Placing(Schedule(header, Sections.flushing(tuple(rows))))
    return replace(schedule, sections=Sections.flushing(tuple(placed.rows())))


def _delayed(rows: Rows, stages: int) -> Rows:
    """Return a rank's rows with each backward after `DELAY` micro-batches more forwards. stages: of the rank."""
    forward = rows[:, KIND] == Kind.FORWARD
    before = np.cumsum(forward) - forward
    late = np.minimum(before + DELAY * stages, forward.sum())
    order: Ints = np.lexsort((forward, np.where(forward, before, late)))
    return rows[order]


@dataclass
class _Placing:
    """Runs the ranks' rows in time, and each pass of a shard as soon as its rank is free.

    passes: those that any rank has run, in the order of all ranks. A rank that has run all of them runs what is ready
    first: the next micro-batch's forward, or the next backward. Every rank can follow, because all ranks can run it.
    """

    schedule: Schedule
    passes: list[tuple[Kind, int]] = field(default_factory=list)
    ended: dict[tuple[int, int, int], float] = field(default_factory=dict)
    ends: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    started: Counter[Kind] = field(default_factory=Counter)
    place: dict[tuple[int, int], int] = field(default_factory=dict)

    def rows(self) -> Iterator[Rows]:
        """Yield each rank's rows with the passes. Raises ScheduleError where ranks wait for one another."""
        header, ranks = self.schedule.header, range(self.schedule.header.num_ranks)
        shares, own = header.stages_sharing, [each.tolist() for each in self.schedule.sections.body]
        found: list[list[list[int]]] = [[] for _ in ranks]
        done, passed, free = [0 for _ in ranks], [0 for _ in ranks], [0.0 for _ in ranks]
        starts: list[tuple[float, bool, list[int]]] = [_NEVER for _ in ranks]
        changed: Iterable[int] = ranks
        while True:
            for rank in changed:
                rows = [(False, each) for each in self._next_passes(rank, passed[rank])]
                rows += [(True, each) for each in own[rank][done[rank] : done[rank] + 1]]
                starts[rank] = min(
                    ((max(self._ready(row), free[rank]), mine, row) for mine, row in rows), default=_NEVER
                )
            rank = min(ranks, key=starts.__getitem__)
            start, mine, row = starts[rank]
            if start == np.inf:
                break
            took = SECONDS[Kind(row[KIND])] / shares[row[STAGE]] if mine else PASS_SECONDS
            free[rank] = start + took
            found[rank].append(row)
            done[rank] += mine
            passed[rank] += not mine
            for_all = self._end(row, free[rank]) or passed[rank] > len(self.passes)
            if passed[rank] > len(self.passes):
                self._add_pass(row)
            changed = ranks if for_all else {rank, *self._neighbours[row[STAGE]]}
        if any(count < len(rows) for count, rows in zip(done, own, strict=True)):
            raise ScheduleError(
                f"{header.name} leaves no time for the passes of an output layer that is sharded over pipeline ranks; "
                "set parallel.vocabulary tensor, or use a schedule such as 1f1b"
            )
        yield from (np.array(each, dtype=np.int32) for each in found)

    @cached_property
    def _neighbours(self) -> list[list[int]]:
        """Ranks of the stages before and after each stage."""
        header = self.schedule.header
        found: list[list[int]] = [[] for _ in header.stages]
        for one, other in pairwise(header.routes[0]):
            found[one].append(header.stages[other].rank)
            found[other].append(header.stages[one].rank)
        return found

    def _add_pass(self, row: list[int]) -> None:
        kind = Kind(row[KIND])
        self.place[int(kind != Kind.FORWARD), row[MICROBATCH]] = len(self.passes)
        self.passes.append((kind, row[MICROBATCH]))
        self.started[kind] += 1

    def _end(self, row: list[int], time: float) -> bool:
        """Record the end of a row, and return whether all ranks may wait for it. The passes of all shards are one
        event, of stage -1, when the last one ends."""
        direction, stage, microbatch = name = self._name(row)
        self.ended[name] = time
        if stage not in self.schedule.header.vocabulary:
            return bool(stage == self.schedule.header.routes[0][-1])
        times = self.ends.setdefault((direction, microbatch), [])
        times.append(time)
        if len(times) < self.schedule.header.num_ranks:
            return False
        self.ended[direction, -1, microbatch] = max(times)
        return True

    def _next_passes(self, rank: int, passed: int) -> list[list[int]]:
        """Return the rows that may be a rank's next pass, after its first `passed` ones."""
        shard, header = self.schedule.header.vocabulary[rank], self.schedule.header
        kinds = (Kind.FORWARD, Kind.BACKWARD) if header.mode == "train" else (Kind.FORWARD,)
        following = self.passes[passed : passed + 1] or [
            (kind, number) for kind in kinds if (number := self.started[kind]) < header.num_microbatches
        ]
        return [rows_of(kind, shard, number)[0].tolist() for kind, number in following]

    def _name(self, row: list[int]) -> tuple[int, int, int]:
        return int(row[KIND] != Kind.FORWARD) + int(row[KIND] == Kind.BACKWARD_WEIGHT), row[STAGE], row[MICROBATCH]

    def _ready(self, row: list[int]) -> float:
        """Return when everything that a row needs has ended, infinity if it is not known yet."""
        direction, stage, microbatch = self._name(row)
        header, needed = self.schedule.header, [] if direction == 0 else [(direction - 1, stage, microbatch)]
        if stage in header.vocabulary:
            needed = [(0, header.routes[0][-1] if direction == 0 else -1, microbatch)]
            before = self.place.get((direction, microbatch), len(self.passes)) - 1
            if before >= 0:
                kind, earlier = self.passes[before]
                needed.append((int(kind != Kind.FORWARD), -1, earlier))
        elif direction < 2:
            neighbour = (self.schedule.previous_stage, self.schedule.next_stage)[direction](stage, microbatch)
            if direction == 1 or neighbour is not None:
                needed.append((direction, -1 if neighbour is None else neighbour, microbatch))
        return max((self.ended.get(each, np.inf) for each in needed), default=0.0)
