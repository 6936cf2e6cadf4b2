"""How often sharded weights are gathered and sharded gradients summed, counted in the orders of a few ranks."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.layout.scheduling import schedule_options
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.schedules import Kind, order
from megapipe.schedules.actions import KIND, MICROBATCH, STAGE, Rows, kind_mask
from megapipe.schedules.gathers import ADDING, USES, stays_of
from megapipe.schedules.generators.registry import Options, find_generator
from megapipe.schedules.schedule import Schedule

Floats = npt.NDArray[np.float64]
RANKS = 4
"""Pipeline ranks whose orders are counted in, at most; the others are like one of them."""
ROUNDS = 3
"""Micro-batches a pipeline rank that are counted in, at most: those behind them add what the last of these add."""
PERIODIC = 128
"""Micro-batches that are counted in at the least where a schedule never flushes: its every step mixes two versions."""


class TrafficCounts(NamedTuple):
    """By stage, per micro-batch: gathers of all its weights, for forward and backward together, and sums of all its
    gradients. gathers, sums: nothing of what stays in its buffer from the first micro-batch of a step to the last;
    all_gathers, all_sums: that too."""

    gathers: Floats
    sums: Floats
    all_gathers: Floats
    all_sums: Floats


def traffic_counts(run: RunLayout) -> TrafficCounts:
    """Of a run; nothing where state is not sharded that far."""
    zero, stages, count = run.config.zero, len(run.ranks), run.num_microbatches
    if zero.stage < 2 or run.costs.of_units.shards == 1:
        return TrafficCounts(*np.zeros((4, stages)))
    own: dict[int, list[int]] = {rank: [] for rank in range(run.pipeline)}
    for stage, rank in enumerate(run.ranks):
        own[rank].append(stage)
    units = [tuple(run.stages.units_per_stage[stage] for stage in own[rank]) for rank in range(run.pipeline)]
    chosen = _shown_ranks(units, min(RANKS, run.pipeline))
    options = tuple(sorted(schedule_options(run.config).items()))
    shown = tuple((rank, units[rank]) for rank in chosen)
    # Gathers are counted under ZeRO-2 as well, so that both stages share one count.
    found = _counted(
        run.config.schedule.name, options, run.pipeline, count, shown, zero.weight_buffers, zero.gradient_buffers
    )
    gathers, sums = np.zeros(stages), np.zeros(stages)
    for rank, mine in own.items():
        like = chosen.index(rank) if rank in chosen else 1
        for chunk, stage in enumerate(mine):
            gathers[stage], sums[stage] = found[like][chunk]
    if zero.stage < 3:
        gathers[:] = 0.0
    crowded = np.array(run.stages.units_per_stage) > zero.gradient_buffers
    once = 1.0 / count * (1 + 1e-9)
    steady = np.where((sums > once) | ((count == 1) & crowded), sums, 0.0)
    return TrafficCounts(np.where(gathers > once, gathers, 0.0), steady, gathers, sums)


def _shown_ranks(units: list[tuple[int, ...]], ranks: int) -> list[int]:
    """The first rank, the last, and between them those with the most units, ascending. units: by rank and chunk."""
    last = len(units) - 1
    fullest = sorted(range(1, last), key=lambda rank: -sum(units[rank]))[: max(0, ranks - 2)]
    return sorted({0, *fullest, last})


@lru_cache(maxsize=1024)
def _counted(
    name: str,
    options: tuple[tuple[str, object], ...],
    ranks: int,
    count: int,
    shown: tuple[tuple[int, tuple[int, ...]], ...],
    weight_buffers: int,
    whole_gradients: int,
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """By shown rank and chunk, gathers and sums of a micro-batch on average. shown: ranks and their chunks' units."""
    given, period = find_generator(name).settled(ranks, count, Options(**dict(options)))  # type: ignore[typeddict-item]
    options = tuple(sorted(given.items()))
    plain = _order(name, options, ranks, min(count, ROUNDS * period))
    few = plain.header.num_microbatches if plain.flushes else min(count, max(PERIODIC, ROUNDS * period))
    long = plain if plain.flushes else _order(name, options, ranks, few)
    fewer = (ROUNDS - 1) * period
    short = _order(name, options, ranks, fewer) if count > few and plain.flushes else None
    found = []
    for rank, units in shown:
        total = _of_rank(long, rank, units, weight_buffers, whole_gradients)
        if short is None:
            whole = total * (count / few)
        else:
            before = _of_rank(short, rank, units, weight_buffers, whole_gradients)
            whole = total + (total - before) / (few - fewer) * (count - few)
        found.append(tuple((float(gathers), float(sums)) for gathers, sums in whole / count))
    return tuple(found)


@lru_cache(maxsize=64)
def _order(name: str, options: tuple[tuple[str, object], ...], ranks: int, count: int) -> Schedule:
    return order(name, ranks, count, **dict(options))  # type: ignore[arg-type]


def _of_rank(
    schedule: Schedule, rank: int, units: tuple[int, ...], weight_buffers: int, whole_gradients: int
) -> Floats:
    """Gathers and sums of a step, in passes over all units of a chunk; shape [chunks, 2].

    The rules of `schedules.gathers`: weights are dropped between steps, gradients of a schedule that does not flush
    are not, so that a step's sums are those that a second step adds.
    """
    rows, every = schedule.sections.body[rank], schedule.header.num_microbatches
    found = np.zeros((len(units), 2))
    found[:, 0] = _moved(_places(schedule, rows, rank, units, USES), units, weight_buffers)
    backwards = [_places(schedule, rows, rank, units, ADDING)]
    found[:, 1] = _moved(backwards[0][::-1], units, whole_gradients)
    if not schedule.flushes:
        later = rows.copy()
        later[:, MICROBATCH] += every
        both = np.concatenate([*backwards, _places(schedule, later, rank, units, ADDING)])
        found[:, 1] = _moved(both[::-1], units, whole_gradients) - found[:, 1]
    return found / np.array(units)[:, None]


def _places(
    schedule: Schedule, rows: Rows, rank: int, units: tuple[int, ...], kinds: tuple[Kind, ...]
) -> npt.NDArray[np.int64]:
    """One number for each update (and so weight version), unit and chunk that rows of some kinds pass, in order; what
    follows on itself once. The chunk is the number's rest by their count."""
    rows = rows[kind_mask(rows[:, KIND], *kinds)]
    chunk = np.searchsorted(np.array(schedule.header.stages_on(rank)), rows[:, STAGE])
    copies = np.array(units)[chunk]
    source = np.repeat(np.arange(len(rows)), copies)
    index = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    unit = np.where((rows[:, KIND] == Kind.FORWARD)[source], index, copies[source] - 1 - index)
    update = (rows[:, MICROBATCH] // schedule.header.microbatches_per_update)[source]
    places = (update * max(units) + unit) * len(units) + chunk[source]
    return places[np.append(True, places[1:] != places[:-1])] if len(places) else places


def _moved(places: npt.NDArray[np.int64], units: tuple[int, ...], buffers: int) -> npt.NDArray[np.int64]:
    """Return, for each chunk, how often one of its units is put into a buffer."""
    if buffers > 2:
        gathers = np.array(stays_of(places.tolist(), buffers).first_use, dtype=np.int64)
    else:  # neighbours differ, so a unit is still in a buffer if it is one of the last two (see `stays_of`)
        gathers = np.flatnonzero(np.append(places[:buffers] >= 0, places[buffers:] != places[:-buffers]))
    return np.bincount(places[gathers] % len(units), minlength=len(units))
