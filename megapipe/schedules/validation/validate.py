"""The validator: every invariant that a lowered schedule must keep, proved on its unrolled rows.

The numerical class that a schedule states is one of them: its order must keep it (`strongest_class`).
"""

from dataclasses import dataclass

import numpy as np

from megapipe.schedules.actions import ADDING
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.errors import ScheduleError, excerpt
from megapipe.schedules.gathers import check_states
from megapipe.schedules.memory import peak_activations, pending_weight_halves
from megapipe.schedules.schedule import NumericalClass, Schedule
from megapipe.schedules.table import Table
from megapipe.schedules.validation.holdings import (
    check_buffers,
    check_gathers,
    check_gradients,
    check_offload,
    check_snapshots,
)
from megapipe.schedules.validation.rows import check_coverage, check_fields, check_header
from megapipe.schedules.validation.waits import (
    check_collectives,
    check_links,
    check_local_order,
    check_progress,
    first_deadlock,
    first_uses,
)

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
    ``weight_versions``: copies of the weights per rank. ``lazy_links``: whether the first step also completes if links
    connect at their first use, which blocks both hosts, as NCCL does; megapipe connects all links at start. ``links``:
    number of links of each rank; NCCL can have `STREAMS_PER_PRIORITY`.
    """

    canonical_order: bool
    peak_activations: tuple[float, ...]
    pending_weight_halves: tuple[float, ...]
    weight_versions: tuple[int, ...]
    lazy_links: bool
    links: tuple[int, ...]


def validate(schedule: Schedule) -> Report:
    """Check a lowered schedule and report its properties.

    Raises ScheduleError, which names the rank, the action and what it waits for, and shows the rows around it.

    Example:
        >>> from megapipe import build, validate
        >>> validate(build("1f1b", 2, 4)).peak_activations
        (2.0, 1.0)
    """
    header = schedule.header
    if not header.lowered:
        raise ScheduleError(f"{header.name} has only compute actions; lower it first")
    check_header(header, schedule.origin)
    check_states(schedule)
    for steps in (1,) if schedule.flushes else tuple(schedule.prologue_steps + bodies for bodies in BODIES_PROVED):
        table = Table.unroll(schedule, steps)
        _check(table)
    check_class(table)
    uses = first_uses(table)
    hanging = first_deadlock(uses, header.connections)
    if hanging:
        raise ScheduleError(
            f"{header.name} deadlocks in its first step where the first collective of a group blocks the host, as "
            f"with NCCL: {hanging}; start the reductions in one order on all ranks"
        )
    return Report(
        canonical_order=first_reordered(table) < 0,
        peak_activations=peak_activations(table) if header.mode == "train" else (0.0,) * header.num_ranks,
        pending_weight_halves=pending_weight_halves(table),
        weight_versions=header.weight_versions,
        lazy_links=not first_deadlock(uses, ()),
        links=tuple(sum(rank in pair for pair in header.connections) for rank in range(header.num_ranks)),
    )


def _check(table: Table) -> None:
    check_fields(table)
    check_coverage(table)
    check_gathers(table)
    check_gradients(table)
    check_offload(table)
    check_snapshots(table)
    dependencies = Dependencies(table)
    check_local_order(table, dependencies.local_needs())
    check_links(dependencies)
    check_collectives(table)
    check_buffers(table)
    check_progress(dependencies)


def strongest_class(table: Table) -> tuple[NumericalClass, str]:
    """Return the strongest class of a schedule, and why it is not a stronger one ("" for A).

    A, the gradients of one process, needs one holder of each part of the model that adds micro-batches in their order,
    whole micro-batches, and one update per step of weights that a flush has brought up to date. B, those of the
    schedule's own serial recursion, needs the first two of these. table: the schedule, unrolled over the steps for
    which it is checked.
    """
    header, row = table.header, first_reordered(table)
    holders = max(header.holders, key=len)
    if len(holders) > 1:
        part = header.stages[holders[0]].part
        return "C", f"stages {', '.join(map(str, holders))} all hold part {part} of the model"
    if header.slices > 1:
        return "C", f"it computes samples in {header.slices} slices"
    if row >= 0:
        late = f"stage {table.stage[row]} adds the gradients of micro-batch {table.microbatch[row]}"
        return "C", f"{late} after those of a later one, on {table.place_of(row)}"
    for stale, reason in (
        (not table.flushes, "its steps do not end with an empty pipeline"),
        (header.updates_per_step > 1, f"it updates {header.updates_per_step} times per step"),
        (header.num_versions > 1, f"it keeps {header.num_versions} versions of weights"),
    ):
        if stale:
            return "B", reason
    return "A", ""


def check_class(table: Table) -> None:
    """Raise ScheduleError if the header states a stronger class than `strongest_class`."""
    header, origin, (strongest, reason) = table.header, table.origin, strongest_class(table)
    if header.numerical_class >= strongest:
        return
    where, near, remedy = "", "", f"register it with class {strongest}"
    if origin is not None:
        number = origin.header["class"]
        where, near = f" ({origin.source}, line {number})", excerpt(origin.text, number)
        remedy = f"leave out that line, or write class {strongest}"
    raise ScheduleError(
        f"schedule {header.name} states class {header.numerical_class}{where}, but its order is of class "
        f"{strongest}, because {reason}: change the order, or {remedy}",
        near,
    )


def first_reordered(table: Table) -> int:
    """Return the first row that adds to a stage's gradients after a later micro-batch, -1 if there is none."""
    rows = table.rows_with(*ADDING)
    rows = rows[np.argsort(table.stage[rows], kind="stable")]
    same = table.stage[rows[1:]] == table.stage[rows[:-1]]
    late = rows[1:][same & (table.microbatch[rows[1:]] < table.microbatch[rows[:-1]])]
    return int(late.min()) if len(late) else -1
