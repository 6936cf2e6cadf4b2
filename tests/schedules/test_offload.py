"""Offload: what leaves, when it comes back, and what copies cost; and copies of the state for a checkpoint."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Offload, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import COMPUTE_KINDS, GROUP, KIND
from megapipe.schedules.memory import microbatches_held, with_snapshots
from megapipe.schedules.registry import GENERATORS
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.simulation.costs import CostPlace
from tests.schedules.support import layouts, schedules


def every_unit(stages, units, prefetch=1, optimizer=False):
    return Offload((tuple(range(units)),) * stages, prefetch, optimizer)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(GENERATORS)), st.integers(1, 4), st.booleans())
def test_prefetches_are_bounded_and_offloaded_units_return(data, name, prefetch, optimizer):
    layout = data.draw(layouts(name, max_ranks=3)) | {"receive_ahead": 1}
    units = layout["units_per_stage"]
    offload = Offload(tuple(tuple(range(count)) for count in units), prefetch, optimizer)
    schedule = build(name, **layout, offload=offload)
    validate(schedule)
    assert loads(dumps(schedule)) == schedule
    for rows in schedule.expand(schedule.prologue_steps + 2):
        moved, waiting, states, computed_since = Counter(), set(), set(), {}
        members = defaultdict(set)  # what a pair reads comes back before all of it
        for row in rows.tolist():
            members[row[GROUP]].add(tuple(row[1:4]))
        for kind, stage, unit, microbatch, version, _, group in rows.tolist():
            place = stage, unit, microbatch
            if kind in (Kind.OFFLOAD, Kind.RELOAD) and version < 0:
                moved[place] += 1 if kind == Kind.OFFLOAD else -1
                if kind == Kind.OFFLOAD:
                    computed_since[place] = 0
                else:
                    assert computed_since[place] > 0, "it came back before anything was computed"
                    waiting.add(place)
            elif kind in COMPUTE_KINDS:
                waiting.discard(place)
                computed_since = {each: count + 1 for each, count in computed_since.items()}
                assert len(waiting - members[group] if group >= 0 else waiting) <= prefetch
            elif kind == Kind.RELOAD:
                states.add((stage, unit))
            elif kind == Kind.OFFLOAD:
                states.remove((stage, unit))
            assert len(states) <= 2
        assert not any(moved.values())
        assert not states


def test_activations_are_those_on_the_device():
    units = [4] * 4
    plain = validate(build("1f1b", 4, 8, units_per_stage=units))
    assert plain.peak_activations == (4.0, 3.0, 2.0, 1.0)
    away = validate(build("1f1b", 4, 8, units_per_stage=units, offload=every_unit(4, 4)))
    # One in use, one that waits; on the last rank the last unit, whose backward follows, in place of the latter.
    assert away.peak_activations == (0.5, 0.5, 0.5, 0.5)


def test_stages_hold_microbatches_by_their_position():
    assert microbatches_held(build("1f1b", 4, 8, units_per_stage=[3] * 4, data_parallel=True)) == (4.0, 3.0, 2.0, 1.0)
    assert microbatches_held(build("2bw", 3, 6)) == (3.0, 2.0, 1.0)
    assert microbatches_held(build("gpipe", 2, 5)) == (5.0, 5.0)


def test_only_copies_longer_than_a_unit_show():
    """Units of 1 and 2 time: a copy of as much as a forward hides, every excess shows between the forwards."""
    schedule = build("1f1b", 1, 2, units_per_stage=[4], offload=Offload(((0, 1, 2),)))
    finish = {
        copy: simulate(schedule, rank_costs(schedule.header, forward=4.0, offload=4.0 * copy)).finish
        for copy in (0.0, 1.0, 1.5)
    }
    assert finish[0.0] == finish[1.0] == 24.0
    # In each micro-batch the second and third unit's copies wait for the one before, by half a time unit each; the
    # third one's is still on its way when its reload is due, half a unit after the fourth forward, and comes back
    # in 1.5 during a backward of 2 that has started by then.
    assert finish[1.5] == 24.0 + 2 * (0.5 + 0.5 + 0.5)


def test_states_are_copied_both_ways_at_once():
    """Updates take no time: each unit's copy out overlaps the next unit's copy in."""
    schedule = build("1f1b", 1, 1, units_per_stage=[5], offload=Offload(optimizer=True))
    run = simulate(schedule, rank_costs(schedule.header, forward=1.0, offload_state=5.0))
    assert run.finish == 3.0 + 5 + 1


def test_no_compute_starts_before_its_activations_are_back():
    schedule = build("zb_h1", 3, 5, units_per_stage=[3] * 3, offload=every_unit(3, 3, prefetch=2, optimizer=True))
    run = simulate(schedule, rank_costs(schedule.header, forward=3.0, offload=7.0, offload_state=5.0, update=1.0))
    place = list(zip(*(column.tolist() for column in run.table.rows.T[1:4]), strict=True))
    back = {(*place[row], run.table.version[row] < 0): row for row in run.table.rows_with(Kind.RELOAD).tolist()}
    checked = 0
    for kinds, activations in (((Kind.BACKWARD_INPUT,), True), ((Kind.UPDATE,), False)):
        for row in run.table.rows_with(*kinds).tolist():
            if (*place[row], activations) in back:
                checked += 1
                assert run.start[row] >= run.end[back[(*place[row], activations)]]
    assert checked > 40


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
