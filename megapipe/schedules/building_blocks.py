"""Building blocks of pipelines: stages on ranks, orders of rows, policies of updates, memory bounds, layers in stages.

A generator may use them or do without; the built-in ones show how. `balance_layers` divides a model's layers into
stages.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import KIND, MICROBATCH, STAGE, Floats, Ints, Kind, Rows, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Sections, StagePlace

Step = tuple[Kind, int, int]
"""Kind, stage, micro-batch."""
Programs = tuple[list[Step], ...]
"""The steps of each rank, in their order."""


class StagePlacement(NamedTuple):
    """Stages in the order of their ids, and the routes over them."""

    stages: tuple[StagePlace, ...]
    routes: tuple[tuple[int, ...], ...]


class Policy(NamedTuple):
    """Rules for weight updates: versions kept on each rank, updates per step, and gradient buffers.

    With 2 gradient buffers, an update waits for the next step's first forward that needs it.
    """

    versions_by_rank: tuple[int, ...]
    updates_per_step: int = 1
    gradient_buffers: int = 1

    @property
    def flushes(self) -> bool:
        """Whether every step ends with an empty pipeline."""
        return max(self.versions_by_rank) == 1 and self.updates_per_step == 1


def flush_policy(num_ranks: int, num_microbatches: int) -> Policy:
    """Keep one version, and write it when the step's gradients are complete."""
    return Policy((1,) * num_ranks)


def linear(num_ranks: int, chunks: int) -> StagePlacement:
    """Place one stage on each rank: stage s on rank s."""
    _require_chunks("linear", chunks, 1)
    return _single_route(range(num_ranks))


def round_robin(num_ranks: int, chunks: int) -> StagePlacement:
    """Place ``chunks`` stages on each rank: stage s on rank ``s % num_ranks``."""
    return _single_route(stage % num_ranks for stage in range(num_ranks * chunks))


def v_shape(num_ranks: int, chunks: int) -> StagePlacement:
    """Place two stages on each rank, down the ranks and back up: rank r has stages r and ``2 * num_ranks - 1 - r``."""
    _require_chunks("v_shape", chunks, 2)
    return _single_route([*range(num_ranks), *reversed(range(num_ranks))])


def bidirectional(num_ranks: int, chunks: int) -> StagePlacement:
    """Place two stages on each rank, of two routes over one model: even micro-batches run down the ranks, odd ones
    up."""
    _require_chunks("bidirectional", chunks, 2)
    return _both_ways(num_ranks, range(num_ranks))


def bidirectional_v(num_ranks: int, chunks: int) -> StagePlacement:
    """Place four stages on each rank: those of `v_shape`, and those of a second route that starts at the last rank."""
    _require_chunks("bidirectional_v", chunks, 4)
    return _both_ways(num_ranks, [*range(num_ranks), *reversed(range(num_ranks))])


def _both_ways(num_ranks: int, ranks: Sequence[int]) -> StagePlacement:
    """Place part i of the model on ``ranks[i]`` for even micro-batches, and on the mirrored rank for odd ones."""
    parts = range(len(ranks))
    down = tuple(StagePlace(part, 0, ranks[part]) for part in parts)
    up = tuple(StagePlace(part, 1, num_ranks - 1 - ranks[part]) for part in parts)
    return StagePlacement((*down, *up), (tuple(parts), tuple(part + len(parts) for part in parts)))


def _require_chunks(name: str, chunks: int, wanted: int) -> None:
    if chunks != wanted:
        raise ScheduleError(f"placement {name} puts {wanted} chunk{'s' * (wanted > 1)} on each rank, not {chunks}")


def _single_route(ranks: Iterable[int]) -> StagePlacement:
    stages = tuple(StagePlace(part, 0, rank) for part, rank in enumerate(ranks))
    return StagePlacement(stages, (tuple(range(len(stages))),))


def alternate(forwards: Rows, backwards: Rows, warmup: int) -> Rows:
    """Return ``warmup`` forwards, then forwards and backwards in turn, then the remaining backwards.

    Both tables have the same number of rows n; with a warmup above n, all forwards come first.
    """
    count = len(forwards)
    warmup = min(warmup, count)
    index = np.arange(count)
    forward_places = np.where(index < warmup, index, 2 * index - warmup)
    backward_places = np.where(index < count - warmup, warmup + 2 * index + 1, count + index)
    rows = np.empty((2 * count, forwards.shape[1]), dtype=forwards.dtype)
    rows[forward_places], rows[backward_places] = forwards, backwards
    return rows


def in_groups(
    num_ranks: int, num_microbatches: int, chunks: int, group_size: int, rank: int, *, ahead: int, slices: int = 1
) -> Rows:
    """Return the rows of one rank, whose stages micro-batches pass in groups: a group passes a chunk before the next
    one, forward in ascending and backward in descending order.

    num_microbatches, group_size: in whole micro-batches; a chunk passes all slices of those of a group in a row.
    ahead: forwards of the last chunk before the first backward. slices: of each micro-batch, which pass one by one;
    backward from the last one on.
    """
    count, size = num_microbatches * slices, min(group_size, num_microbatches) * slices
    group, chunk, place = (grid.ravel() for grid in np.mgrid[: -(-count // size), :chunks, :size])
    unit = group * size + place
    rows = alternate(
        rows_of(Kind.FORWARD, chunk * num_ranks + rank, unit),
        rows_of(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, unit - 2 * (unit % slices) + slices - 1),
        # The first rank may start at most two groups before the last rank, or a chunk would wait for itself.
        warmup=(chunks - 1) * size + min(ahead, 2 * size) + slices - 1,
    )
    return rows[rows[:, MICROBATCH] < count]


def rows_from_steps(steps: list[Step]) -> Rows:
    """Return the rows of (kind, stage, micro-batch) triples."""
    kind, stage, microbatch = np.array(steps, dtype=np.int64).reshape(-1, 3).T
    return rows_of(kind, stage, microbatch)


def one_stage_file(name: str, rows: str) -> str:
    """Return a schedule file for any number p of ranks, with one stage on each, and m micro-batches. rows: the lines
    of rank r."""
    header = f"megapipe schedule 3\nname {name}\nranks p\nmicrobatches m\nfor s in 0..p: stage {{s}} rank {{s}}\n"
    return f"{header}body\nrank r:\n{rows}"


def held_after_warmup(num_ranks: int, num_microbatches: int, chunks: int, options: Mapping[str, Any]) -> Floats:
    """Return a lower bound of the micro-batches of each chunk that ranks hold at their peak, shape [ranks, 1].

    For one chunk per rank, where rank r runs p - r forwards before its first backward.
    """
    warmup = num_ranks - np.arange(num_ranks)
    return np.minimum(warmup, num_microbatches).astype(np.float64)[:, None]


def held_after_all_forwards(num_ranks: int, num_microbatches: int, chunks: int, options: Mapping[str, Any]) -> Floats:
    """Return the same bound as `held_after_warmup`, where all forwards run before the first backward; halves of split
    backwards may run in any order."""
    return np.full((num_ranks, chunks), 0.0 if options.get("two_bp", False) else float(num_microbatches))


HELD: Final = {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}
"""Change in the number of chunks of activations that a rank holds, by the kind of an action."""
ROUNDING = 1e-9
"""Difference of times that counts as none."""


@dataclass(frozen=True)
class Times:
    """Times of one rank's whole part of the model for which an order is made, in any one unit of time."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward, self.backward_input, self.backward_weight) <= 0 or self.latency < 0:
            raise ScheduleError(f"{self}: compute times must be above 0, and the latency must be at least 0")

    def of(self, kind: Kind, chunks: int) -> float:
        """Return the time of a kind of action on one of the ``chunks`` stages of a rank."""
        whole = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }
        return whole[kind] / chunks


EQUAL_TIMES: Final = Times()
"""Forwards and both halves of backwards take the same time, and messages none."""


@dataclass(frozen=True)
class Timed:
    """Programs with the weight halves placed, and the longest time on any one rank from its first start to its end."""

    programs: Programs
    cost: float


def split_backwards(sections: Sections, placement: StagePlacement, times: Times, max_pending: int | None) -> Sections:
    """Return a flushing schedule with every backward split into halves. Weight halves run oldest first: in idle time
    where they fit, at the latest when ``max_pending`` wait, the rest at the end."""
    if max_pending is not None and max_pending < 1:
        raise ScheduleError(
            f"max_pending is {max_pending}; it must be at least 1, "
            "because each backward's weight half is postponed at least once"
        )
    programs = tuple(steps_of(rows) for rows in sections.body)
    return cheapest([fill_idle_time(programs, placement, times, max_pending)])


def cheapest(orders: Iterable[Timed]) -> Sections:
    """Return the order with the least cost as a schedule that flushes."""
    best = min(orders, key=lambda timed: timed.cost)
    return Sections.flushing(map(rows_from_steps, best.programs))


def steps_of(rows: Rows) -> list[Step]:
    """Return the (kind, stage, micro-batch) triples of rows, whole backwards as input halves."""
    columns = rows[:, [KIND, STAGE, MICROBATCH]].tolist()
    return [
        (Kind.BACKWARD_INPUT if kind == Kind.BACKWARD else Kind(kind), stage, microbatch)
        for kind, stage, microbatch in columns
    ]


def most_held(steps: list[Step]) -> int:
    """Return the peak number of chunks of activations that a rank holds; a chunk counts until its weight half."""
    return max(accumulate((HELD.get(kind, 0) for kind, _, _ in steps), initial=0))


def fill_idle_time(
    programs: Programs, placement: StagePlacement, times: Times, max_pending: int | None, limit: int | None = None
) -> Timed:
    """Run forwards and input halves in their order, adding a weight half for each input half. Weight halves that the
    programs already hold stay where they are.

    limit: chunks of activations that a rank may hold until their weight halves; more where the programs need more.
    """
    filler = _Filler(programs, placement, times, max_pending, limit)
    ranks = range(len(programs))
    while sum(filler.advance(rank) for rank in ranks):
        pass
    return Timed(tuple(filler.out), max(filler.finish(rank) for rank in ranks))


def ready_time(step: Step, ends: Mapping[Step, float], stages: Sequence[StagePlace], latency: float) -> float:
    """Return when the result that a step needs arrives on its rank, by the ends of earlier steps of a single route:
    infinity while it is not known, 0 if the step needs none."""
    kind, stage, microbatch = step
    if kind == Kind.BACKWARD_WEIGHT or (kind == Kind.FORWARD and stage == 0):
        return 0.0
    source = kind, stage + (-1 if kind == Kind.FORWARD else 1), microbatch
    if source[1] == len(stages):
        source = Kind.FORWARD, stage, microbatch
    hop = stages[source[1]].rank != stages[stage].rank
    return ends.get(source, inf) + (latency if hop else 0.0)


class _Filler:
    """Runs the programs of all ranks in time, and places the weight halves."""

    def __init__(
        self, programs: Programs, placement: StagePlacement, times: Times, max_pending: int | None, limit: int | None
    ) -> None:
        self._programs, self._stages, self._times = programs, placement.stages, times
        self._max, self._limit, self._held = max_pending, limit, [0] * len(programs)
        self._chunks = len(placement.stages) // len(programs)
        self._next, self._clock = [0] * len(programs), [0.0] * len(programs)
        self._started: list[float | None] = [None] * len(programs)
        self._pending: list[deque[Step]] = [deque() for _ in programs]
        self._placed = {step for steps in programs for step in steps if step[0] == Kind.BACKWARD_WEIGHT}
        self._ends: dict[Step, float] = {}
        self.out: list[list[Step]] = [[] for _ in programs]

    def advance(self, rank: int) -> bool:
        """Run a rank's program until it waits for another rank."""
        before = self._next[rank]
        program = self._programs[rank]
        while self._next[rank] < len(program):
            step = program[self._next[rank]]
            ready = ready_time(step, self._ends, self._stages, self._times.latency)
            if ready == inf:
                break
            self._fill(rank, step, ready)
            self._run(rank, step, ready)
            self._next[rank] += 1
        return self._next[rank] > before

    def finish(self, rank: int) -> float:
        """Run the weight halves that are left, and return the rank's time from its first start to its end."""
        while self._pending[rank]:
            self._run(rank, self._pending[rank].popleft(), 0.0)
        return self._clock[rank] - (self._started[rank] or 0.0)

    def _fill(self, rank: int, step: Step, ready: float) -> None:
        """Run weight halves that fit before the step is ready, and those that may wait no longer."""
        pending = self._pending[rank]
        duration = self._times.of(Kind.BACKWARD_WEIGHT, self._chunks)
        while pending:
            fits = self._clock[rank] + duration <= ready + ROUNDING
            late = step[0] == Kind.BACKWARD_INPUT and self._max is not None and len(pending) >= self._max
            full = step[0] == Kind.FORWARD and self._limit is not None and self._held[rank] >= self._limit
            if not (fits or late or full):
                return
            self._run(rank, pending.popleft(), 0.0)

    def _run(self, rank: int, step: Step, ready: float) -> None:
        start = max(self._clock[rank], ready)
        if self._started[rank] is None:
            self._started[rank] = start
        self._clock[rank] = self._ends[step] = start + self._times.of(step[0], self._chunks)
        self.out[rank].append(step)
        self._held[rank] += HELD.get(step[0], 0)
        weight = (Kind.BACKWARD_WEIGHT, step[1], step[2])
        if step[0] == Kind.BACKWARD_INPUT and weight not in self._placed:
            self._pending[rank].append(weight)


BALANCE_ROUNDING: Final = 1e-12
"""Relative tolerance of the smallest bottleneck, for rounding errors of sums."""


def balance_layers(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers into contiguous stages with the smallest possible largest cost.

    Args:
        costs: time of every layer in order, embedding and head counted as layers of their own.
        num_stages: stages to fill, each with at least one layer.

    Returns:
        The half-open range of layers of each stage. If several cuts are equally good, the sum of squared costs of the
        stages decides.

    Raises:
        ScheduleError: more stages than layers, or a cost that is negative or infinite.
    """
    layers = np.asarray(costs, dtype=np.float64)
    if not 1 <= num_stages <= len(layers):
        raise ScheduleError(f"{len(layers)} layers cannot fill {num_stages} stages with at least one layer each")
    if not np.all(np.isfinite(layers)) or layers.min() < 0:
        raise ScheduleError(f"layer costs must be finite and not negative, got {list(costs)}")
    # The cost of layers start to end - 1 is at [end, start]; infinite if there are none.
    total = np.append(0.0, np.cumsum(layers))
    runs = total[:, None] - total[None]
    runs[np.triu_indices(len(total))] = np.inf
    bottleneck = _smallest_bottleneck(runs, num_stages)
    cuts = _evenest_cuts(runs, num_stages, bottleneck * (1 + BALANCE_ROUNDING))
    return tuple(pairwise(cuts.tolist()))


def check_assignment(sizes: Sequence[int], num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the range of layers of each stage from numbers of layers that the user sets; raises ScheduleError if they
    do not fit."""
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes, default=0) < 1:
        raise ScheduleError(
            f"layers per stage {list(sizes)} must be {num_stages} numbers of at least 1 with sum {num_layers}"
        )
    ends = np.cumsum(sizes).tolist()
    return tuple((end - size, end) for size, end in zip(sizes, ends, strict=True))


def _smallest_bottleneck(runs: Floats, num_stages: int) -> float:
    """Return the smallest possible cost of the largest stage, by dynamic programming over stages and layers."""
    best = np.full(len(runs), np.inf)
    best[0] = 0.0
    for _ in range(num_stages):
        best = np.maximum(best, runs).min(axis=1)
    return float(best[-1])


def _evenest_cuts(runs: Floats, num_stages: int, limit: float) -> Ints:
    """Return the cut with the least sum of squares whose stages cost at most ``limit``, shape [stages + 1]."""
    squares = np.where(runs <= limit, runs, np.inf) ** 2
    best = np.full(len(runs), np.inf)
    best[0] = 0.0
    came_from = np.zeros((num_stages, len(runs)), dtype=np.int64)
    for stage in range(num_stages):
        sums = best + squares
        came_from[stage] = sums.argmin(axis=1)
        best = sums.min(axis=1)
    cuts = np.zeros(num_stages + 1, dtype=np.int64)
    cuts[-1] = len(runs) - 1
    for stage in range(num_stages - 1, -1, -1):
        cuts[stage] = came_from[stage, cuts[stage + 1]]
    return cuts
