"""Copies of the state for a checkpoint: one for each unit, and how long updates wait for them.

The oracle of times is written down unit by unit: an update starts when the one before it and its own copy have ended.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import KIND
from megapipe.schedules.memory import with_snapshots
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.simulation.costs import CostPlace
from tests.schedules.support import schedules


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


def test_a_copy_may_start_anywhere_before_its_update():
    text = dumps(with_snapshots(build("1f1b", 1, 1, units_per_stage=[2])))
    for later in ("F0.0@0", "B0.0@0", "U0/0.0@1"):
        validate(loads(text.replace(" SS0/1.0@0", "").replace(later, f"{later} SS0/1.0@0")))


def test_a_schedule_without_updates_copies_nothing():
    with pytest.raises(ScheduleError, match="updates nothing"):
        with_snapshots(build("1f1b", 2, 2, mode="forward"))
