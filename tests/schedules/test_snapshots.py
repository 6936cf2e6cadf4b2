"""Copies of the state for a checkpoint: what the validator refuses, and how long updates wait for them.

The oracle of times is written down unit by unit: an update starts when the one before it and its own copy have ended.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Schedule, ScheduleError, build, rank_costs, simulate, validate
from megapipe.schedules.actions import KIND
from megapipe.schedules.memory import with_snapshots
from megapipe.schedules.schedule import SECTIONS, Sections
from megapipe.schedules.simulation.costs import CostPlace
from tests.schedules.support import schedules


def with_rows(schedule: Schedule, change) -> Schedule:
    """The schedule with the rows of rank 0 changed, in its only section."""
    body = (change(schedule.sections.body[0]), *schedule.sections.body[1:])
    return replace(schedule, sections=Sections.flushing(body))


@settings(max_examples=40, deadline=None)
@given(schedules(max_ranks=3, max_microbatches=4))
def test_every_schedule_can_copy_its_state(schedule):
    copying = with_snapshots(schedule)
    validate(copying)
    for name in SECTIONS:
        for rows, before in zip(copying.sections[name], schedule.sections[name], strict=True):
            assert np.array_equal(rows[rows[:, KIND] != Kind.SNAPSHOT], before)
    count = sum(np.count_nonzero(rows[:, KIND] == Kind.SNAPSHOT) for rows in copying.expand(3))
    updated = {tuple(row[1:3]) for rows in schedule.expand(3) for row in rows[rows[:, KIND] == Kind.UPDATE].tolist()}
    assert count == len(updated) * (3 if schedule.flushes else 1)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_an_update_that_does_not_wait_is_refused(data):
    schedule = with_snapshots(build("1f1b", 2, 3, units_per_stage=[2, 3]))
    rows = schedule.sections.body[0]
    copy = data.draw(st.sampled_from(np.flatnonzero(rows[:, KIND] == Kind.SNAPSHOT).tolist()))
    place = data.draw(st.integers(0, len(rows) - 1))
    (update,) = np.flatnonzero((rows[:, KIND] == Kind.UPDATE) & (rows[:, 1:3] == rows[copy, 1:3]).all(axis=1))
    moved = with_rows(schedule, lambda rows: np.insert(np.delete(rows, copy, 0), place, rows[copy], 0))
    if place < update:
        validate(moved)
    else:
        with pytest.raises(ScheduleError, match="it needs SNAPSHOT"):
            validate(moved)
    with pytest.raises(ScheduleError, match="but not that of this one"):
        validate(with_rows(schedule, lambda rows: np.delete(rows, copy, 0)))
    with pytest.raises(ScheduleError, match="second time"):
        validate(with_rows(schedule, lambda rows: np.insert(rows, copy, rows[copy], 0)))
    older = rows.copy()
    older[copy, 4] += 1
    with pytest.raises(ScheduleError, match="version"):
        validate(with_rows(schedule, lambda rows: older))


@given(
    copies=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=5),
    updates=st.lists(st.floats(0.0, 3.0), min_size=5, max_size=5),
    microbatches=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_each_update_waits_for_its_own_copy(copies, updates, microbatches):
    schedule = with_snapshots(build("1f1b", 1, microbatches, units_per_stage=[len(copies)]))
    places = {CostPlace(Kind.SNAPSHOT, 0, unit): time for unit, time in enumerate(copies)}
    places |= {CostPlace(Kind.UPDATE, 0, unit): time for unit, time in enumerate(updates[: len(copies)])}
    costs = rank_costs(schedule.header, forward=1.0, backward=2.0).with_times(places)
    copied, updated = 0.0, 3.0 * microbatches
    for copy, update in zip(copies, updates, strict=False):
        copied += copy
        updated = max(updated, copied) + update
    assume(sum(updates[: len(copies)]) > 0)
    assert simulate(schedule, costs).finish == pytest.approx(updated)


def test_a_schedule_without_updates_copies_nothing():
    with pytest.raises(ScheduleError, match="updates nothing"):
        with_snapshots(build("1f1b", 2, 2, mode="forward"))
