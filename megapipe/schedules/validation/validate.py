"""The validator: every invariant that a lowered schedule must keep, proved on its unrolled rows."""

from dataclasses import dataclass

import numpy as np

from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import check_states
from megapipe.schedules.memory import peak_activations, pending_weight_halves
from megapipe.schedules.promise import Promise, first_reordered
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.table import Table
from megapipe.schedules.validation.coverage import check_coverage
from megapipe.schedules.validation.fields import check_fields, check_header
from megapipe.schedules.validation.first_use import FirstUses
from megapipe.schedules.validation.holdings import (
    check_buffers,
    check_gathers,
    check_gradients,
    check_offload,
    check_snapshots,
)
from megapipe.schedules.validation.order import check_local_order
from megapipe.schedules.validation.transfers import check_collectives, check_links, check_progress

BODIES_PROVED = (0, 1, 2, 3)
"""Bodies between prologue and epilogue that are checked; periodicity gives the rest."""
STREAMS_PER_PRIORITY = 32
"""Streams of one priority that torch has on a GPU (c10/cuda/CUDAStream.h). It hands them out in turn, one to each NCCL
communicator, so the 33rd link of a rank would share the stream of the first."""


@dataclass(frozen=True)
class Report:
    """Properties of a valid schedule.

    ``canonical_order``: on every stage gradients are added in micro-batch order, as one process would.
    ``peak_activations`` and ``pending_weight_halves``: per rank, in micro-batches of the whole rank's layers.
    ``weight_versions``: copies of the weights per rank. ``lazy_links``: the first step also gets through where a link
    connects at its first use, which blocks both hosts, as NCCL does; megapipe connects all links at start. ``links``:
    number of links of each rank; NCCL can have `STREAMS_PER_PRIORITY`.
    """

    canonical_order: bool
    peak_activations: tuple[float, ...]
    pending_weight_halves: tuple[float, ...]
    weight_versions: tuple[int, ...]
    lazy_links: bool
    links: tuple[int, ...]


def validate(schedule: Schedule, *, activation_budget: float | None = None) -> Report:
    """Check a lowered schedule and report its properties.

    ``activation_budget`` is the most micro-batches' activations that a rank may keep. Raises ScheduleError that names
    the rank, the action and what it waits for, and shows the rows around it.

    Example:
        >>> from megapipe import build, validate
        >>> validate(build("1f1b", 2, 4)).peak_activations
        (2.0, 1.0)
    """
    header = schedule.header
    if not header.lowered:
        raise ScheduleError(f"{header.name} has only compute actions; lower it before validating it")
    check_header(header, schedule.origin)
    check_states(schedule)
    for steps in (1,) if schedule.flushes else tuple(schedule.prologue_steps + bodies for bodies in BODIES_PROVED):
        table = Table.unroll(schedule, steps)
        _check(table, flushes=schedule.flushes)
    Promise.of(table, flushes=schedule.flushes).check(table)
    first_uses = FirstUses.of(table)
    hanging = first_uses.deadlock(header.connections)
    if hanging:
        raise ScheduleError(
            f"{header.name} deadlocks in its first step where the first collective of a group blocks the host, as "
            f"with NCCL: {hanging}; start the reductions in one order on all ranks"
        )
    report = Report(
        canonical_order=first_reordered(table) < 0,
        peak_activations=peak_activations(table) if header.mode == "train" else (0.0,) * header.num_ranks,
        pending_weight_halves=pending_weight_halves(table),
        weight_versions=header.weight_versions,
        lazy_links=not first_uses.deadlock(()),
        links=tuple(sum(rank in pair for pair in header.connections) for rank in range(header.num_ranks)),
    )
    budget = np.inf if activation_budget is None else activation_budget
    for rank, peak in enumerate(report.peak_activations):
        if peak > budget:
            kept = f"{header.name} keeps {peak:g} micro-batches of activations on rank {rank}"
            raise ScheduleError(f"{kept}, above the budget of {budget:g}")
    return report


def _check(table: Table, *, flushes: bool) -> None:
    check_fields(table)
    check_coverage(table)
    check_gathers(table)
    check_gradients(table)
    check_offload(table)
    check_snapshots(table)
    dependencies = Dependencies(table)
    check_local_order(table, dependencies.local_needs())
    check_links(dependencies)
    check_collectives(table, flushes=flushes)
    check_buffers(table)
    check_progress(dependencies, flushes=flushes)
