"""Offload: what leaves, when it comes back, what is on the device meanwhile, and what copies cost."""

import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Offload, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import COMPUTE_KINDS, GROUP
from megapipe.schedules.command.main import main
from megapipe.schedules.memory import microbatches_held
from megapipe.schedules.registry import GENERATORS
from tests.schedules.support import layouts, words


def every_unit(stages, units, prefetch=1, optimizer=False):
    return Offload((tuple(range(units)),) * stages, prefetch, optimizer)


def compute_of(schedule):
    return words(schedule, 0).removeprefix("DC.0 ").partition(" DS")[0]


def test_units_leave_after_forward_and_return_before_backward():
    schedule = build("1f1b", 1, 1, units_per_stage=[4], offload=every_unit(1, 4))
    assert compute_of(schedule) == (
        "F0/0.0 OF0/0.0 F0/1.0 OF0/1.0 F0/2.0 OF0/2.0 F0/3.0 RE0/2.0 B0/3.0 RE0/1.0 B0/2.0 RE0/0.0 B0/1.0 B0/0.0"
    )


def test_units_reloaded_at_once_do_not_leave():
    schedule = build("1f1b", 1, 1, units_per_stage=[4], offload=every_unit(1, 4, prefetch=4))
    assert compute_of(schedule) == "F0/0.0 OF0/0.0 F0/1.0 F0/2.0 RE0/0.0 F0/3.0 B0/3.0 B0/2.0 B0/1.0 B0/0.0"


def test_reloads_precede_recomputed_units():
    schedule = build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(((0,),)), recompute=[[range(1, 2)]])
    assert compute_of(schedule) == "F0/0.0 OF0/0.0 F0/1.0 F0/2.0 B0/2.0 RE0/0.0 R0/1.0 B0/1.0 B0/0.0"


def test_split_backwards_reload_before_their_input_half():
    schedule = build("zb_h1", 1, 1, units_per_stage=[2], offload=Offload(((0,),)))
    assert compute_of(schedule) == "F0/0.0 OF0/0.0 F0/1.0 RE0/0.0 BI0/1.0 BI0/0.0 BW0/1.0 BW0/0.0"


def test_updates_have_two_units_state_on_device():
    schedule = build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(optimizer=True))
    assert words(schedule, 0).partition("DS.0 ")[2] == (
        "RE0/0.0 RE0/1.0 U0/0.0 OF0/0.0 RE0/2.0 U0/1.0 OF0/1.0 U0/2.0 OF0/2.0"
    )


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
    away = validate(build("1f1b", 4, 8, units_per_stage=units, offload=every_unit(4, 4)))
    assert plain.peak_activations == (4.0, 3.0, 2.0, 1.0)
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" OF0/0.0", " OF0/0.0 OF0/0.0", "a second time"),
        (" RE0/0.0 ", " RE0/0.0 RE0/0.0 ", "a second time"),
        (" OF0/0.0", "", "the data that it reloads is never offloaded"),
        (" RE0/0.0 ", " ", "the data that it offloads is never reloaded"),
        (" F0/0.0@0 OF0/0.0", " OF0/0.0 F0/0.0@0", "comes after it"),
        (" RE0/0.0 B0/1.0@0 B0/0.0@0", " B0/1.0@0 B0/0.0@0 RE0/0.0", "comes after it"),
        (" OF0/0.0", " OF0.0", "no forward of this chunk or unit"),
        (" OF0/0.0", " OF0/2.0", "fewer units"),
        (" OF0/0.0", " OF0/0.0^0", "slot must be unused"),
        (" B0/0.0@0", " R0/0.0@0 B0/0.0@0", "must not be offloaded"),
        (" OF0/0.0@1", "", "the data that it reloads is never offloaded"),
        (" U0/0.0@1 OF0/0.0@1", " OF0/0.0@1 U0/0.0@1", "comes after it"),
        (" RE0/0.0@1 RE0/1.0@1 U0/0.0@1", " RE0/1.0@1 U0/0.0@1 RE0/0.0@1", "comes after it"),
        (" RE0/0.0@1", " RE0/0.0@2", "update 0 writes version 1"),
        (" RE0/0.0@1", " RE0/3.0@1", "keeps no such state"),
    ],
)
def test_what_moves_is_validated(old, new, message):
    text = dumps(build("1f1b", 1, 1, units_per_stage=[2], offload=Offload(((0,),), optimizer=True)))
    validate(loads(text))
    assert old in text, text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new, 1)))


def test_a_third_state_on_the_device_is_refused():
    text = dumps(build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(optimizer=True)))
    early = text.replace(" RE0/2.0@1", "", 1).replace(" U0/0.0@1", " RE0/2.0@1 U0/0.0@1", 1)
    with pytest.raises(ScheduleError, match="the state of 2 units is already on the device"):
        validate(loads(early))
    partly = text.replace(" RE0/2.0@1", "", 1).replace(" OF0/2.0@1", "", 1)
    with pytest.raises(ScheduleError, match="the state of other updates is moved, but not that of this one"):
        validate(loads(partly))


def test_evaluation_moves_nothing():
    schedule = build("1f1b", 1, 2, mode="forward", units_per_stage=[2], offload=every_unit(1, 2, optimizer=True))
    assert words(schedule, 0) == "F0.0 F0.1"
    with pytest.raises(ScheduleError, match="a schedule of mode 'forward' cannot have such actions"):
        validate(loads(dumps(schedule).replace(" F0.0@0", " F0.0@0 OF0.0", 1)))


def test_units_are_checked():
    for offload, message in (
        (Offload(((0,),)), "units for 1 stages, but there are 2"),
        (Offload(((0, 2), ())), "from 0 to 1"),
        (Offload(((0, 0), ())), "must be distinct"),
        (Offload(((0,), ()), prefetch=0), "prefetch is 0; it must be at least 1"),
    ):
        with pytest.raises(ScheduleError, match=message):
            build("1f1b", 2, 2, units_per_stage=[2, 2], offload=offload)
    with pytest.raises(ScheduleError, match=r"units \[1\] are both recomputed and offloaded"):
        build("1f1b", 1, 2, units_per_stage=[2], offload=Offload(((0, 1),)), recompute=[[range(1, 2)]])


def test_the_command_offloads(tmp_path, capsys):
    shape = ["--schedule=1f1b", "--ranks=2", "--units=4", "--offload=1", "--offload-time=0.5"]
    assert main(["simulate", "--json", *shape, "--offload-state", "--offload-state-time=1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_activations"] == [0.5, 0.5]
    trace = tmp_path / "trace.json"
    assert main(["draw", *shape, "--prefetch=2", "--output", str(trace)]) == 0
    lanes = {event["cat"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {"compute", "copy out", "copy in"} <= lanes
    assert main(["simulate", "--offload=0"]) == 2
    assert "--offload is 0; it must be at least 1" in capsys.readouterr().err
