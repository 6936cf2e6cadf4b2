"""The chain of lowering passes, from a schedule of compute actions to one that an engine can run."""

from dataclasses import replace

import numpy as np

from megapipe.schedules.actions import COMPUTE_KINDS, VERSION, Rows, kind_mask
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering.communication import Messages, place_receives
from megapipe.schedules.lowering.insertion import insert
from megapipe.schedules.lowering.program import STEADY_BODIES, Program
from megapipe.schedules.lowering.reductions import add_reductions
from megapipe.schedules.lowering.refine import refine
from megapipe.schedules.lowering.slots import assign_slots
from megapipe.schedules.schedule import Schedule, Sections, shift_rows


def lower(schedule: Schedule, *, receive_ahead: int = 1, lazy: bool = False) -> Schedule:
    """Add to a schedule of compute actions everything else that a step does.

    ``receive_ahead``: compute actions between a receive's posting and its use (at least 1: less can hang where sends
    wait for their receive). ``lazy``: updates wait until right before the first forward that reads the new version.
    Raises ScheduleError where the compute actions do not fit together.
    """
    if receive_ahead < 1:
        raise ScheduleError(f"receive_ahead {receive_ahead} is below 1: post receives before they are needed")
    _require_compute_only(schedule)
    program = _with_versions(Program.of(schedule))
    training = schedule.header.mode == "train"
    if training and schedule.header.data_parallel:
        program = refine(program)
    messages = Messages.of(program)
    post = place_receives(program, messages, receive_ahead)
    insertions = [messages.sends(program), messages.receives(program, post)]
    if training:
        insertions += add_reductions(program, lazy=lazy)
    program, _ = insert(program, insertions)
    program = assign_slots(program, flushes=schedule.flushes)
    header = replace(program.header, lowered=True, gradient_buffers=2 if lazy else 1)
    return Schedule(header, _sections(program, flushes=schedule.flushes))


def _require_compute_only(schedule: Schedule) -> None:
    if schedule.header.lowered:
        raise ScheduleError(f"{schedule.header.name} is lowered already; lower the compute actions it was made from")
    for rows in (*schedule.sections.prologue, *schedule.sections.body, *schedule.sections.epilogue):
        if not np.all(kind_mask(rows[:, 0], *COMPUTE_KINDS)):
            raise ScheduleError(f"{schedule.header.name} holds communication actions; lowering adds them")


def _with_versions(program: Program) -> Program:
    """Every compute row reads the version of its micro-batch's update."""
    rows = program.rows.copy()
    rows[:, VERSION] = program.update
    return replace(program, rows=rows)


def _sections(program: Program, *, flushes: bool) -> Sections:
    """Cut the table back into prologue, one steady body and epilogue, each counted from its own step."""
    bodies = 1 if flushes else STEADY_BODIES
    steady = (bodies + 1) // 2
    return Sections(
        _cut(program, 0, step=0), _cut(program, steady, step=steady - 1), _cut(program, bodies + 1, step=bodies)
    )


def _cut(program: Program, section: int, *, step: int) -> tuple[Rows, ...]:
    header = program.header
    keys = program.rank * program.num_sections + program.section
    wanted = np.arange(header.num_ranks) * program.num_sections + section
    bounds = zip(np.searchsorted(keys, wanted), np.searchsorted(keys, wanted + 1), strict=True)
    microbatches, versions = step * header.num_microbatches, step * header.updates_per_step
    return tuple(shift_rows(program.rows[first:last], -microbatches, -versions) for first, last in bounds)
