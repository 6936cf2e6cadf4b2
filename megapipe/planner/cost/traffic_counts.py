"""How often sharded weights are gathered and sharded gradients summed, counted in a lowered schedule of few ranks."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.runs.scheduling import schedule_options
from megapipe.schedules import Kind, order
from megapipe.schedules.actions import KIND, STAGE
from megapipe.schedules.generators.registry import find_generator
from megapipe.schedules.lowering import lower, replica_traffic

Floats = npt.NDArray[np.float64]
RANKS = 4
"""Pipeline ranks of the schedule that is counted in, at most; of a longer pipeline the others are like the last."""
ROUNDS = 2
"""Micro-batches a rank that are counted in, at most."""


class TrafficCounts(NamedTuple):
    """By stage, per micro-batch: gathers of all its weights, for forward and backward together, and sums of all its
    gradients."""

    gathers: Floats
    sums: Floats


def traffic_counts(run: RunLayout) -> TrafficCounts:
    """Of a run; nothing where state is not sharded that far."""
    zero, stages = run.config.zero, len(run.ranks)
    if zero.stage < 2 or run.costs.of_units.shards == 1:
        return TrafficCounts(np.zeros(stages), np.zeros(stages))
    ranks = min(RANKS, run.pipeline)
    count = min(run.num_microbatches, ROUNDS * ranks)
    own: dict[int, list[int]] = {rank: [] for rank in range(run.pipeline)}
    for stage, rank in enumerate(run.ranks):
        own[rank].append(stage)
    units = [tuple(run.stages.units_per_stage[stage] for stage in own[rank]) for rank in range(run.pipeline)]
    chosen = _shown_ranks(units, ranks)
    options = tuple(sorted(schedule_options(run.config).items()))
    buffers = zero.weight_buffers if zero.stage >= 3 else 0
    shown = tuple(units[rank] for rank in chosen)
    found = _counted(run.config.schedule.name, options, ranks, count, shown, buffers, zero.gradient_buffers)
    gathers, sums = [0.0] * stages, [0.0] * stages
    for rank, mine in own.items():
        like = chosen.index(rank) if rank in chosen else 1
        # What stays in its buffer is gathered and summed once a step, and is none of every micro-batch's.
        gathered, summed = sum(units[rank]) > zero.weight_buffers, sum(units[rank]) > zero.gradient_buffers
        for chunk, stage in enumerate(mine):
            of_gathers, of_sums = found[like][chunk]
            gathers[stage], sums[stage] = of_gathers * gathered, of_sums * summed
    return TrafficCounts(np.array(gathers), np.where(np.array(sums) > 1.0 / count, sums, 0.0))


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
    units: tuple[tuple[int, ...], ...],
    weight_buffers: int,
    whole_gradients: int,
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """By rank and chunk, gathers and sums of a micro-batch on average."""
    places = find_generator(name).placement(ranks, len(units[0])).stages
    stages = [[stage for stage, place in enumerate(places) if place.rank == rank] for rank in range(ranks)]
    per_stage = [0] * len(places)
    for mine, own in zip(stages, units, strict=True):
        for stage, size in zip(mine, own, strict=True):
            per_stage[stage] = size
    schedule = order(
        name,
        ranks,
        count,
        units_per_stage=per_stage,
        data_parallel=True,
        weight_buffers=weight_buffers,
        whole_gradients=whole_gradients,
        **dict(options),  # type: ignore[arg-type]
    )
    if schedule.flushes:
        rows = replica_traffic(schedule)
    else:
        rows = np.concatenate(lower(schedule).expand(max(1, schedule.prologue_steps)))
    totals = {
        kind: np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(per_stage)) / (np.array(per_stage) * count)
        for kind in (Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS)
    }
    gathers, sums = totals[Kind.GATHER_WEIGHTS], totals[Kind.REDUCE_GRADIENTS]
    return tuple(tuple((float(gathers[stage]), float(sums[stage])) for stage in mine) for mine in stages)
