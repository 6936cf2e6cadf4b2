"""The orders that the papers give, and that every built schedule trains the model that one process would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import GENERATORS, Kind, ScheduleError, build, check_microbatches, order, validate
from tests.schedules.interpreter import run
from tests.schedules.serial import serial
from tests.schedules.support import layouts, words


def test_gpipe_runs_all_forwards_then_all_backwards():
    schedule = order("gpipe", 2, 3)
    assert words(schedule, 0) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert words(schedule, 1) == "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"


def test_1f1b_alternates_after_its_warm_up():
    schedule = order("1f1b", 3, 4)
    assert words(schedule, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert words(schedule, 1) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"
    assert words(schedule, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"


def test_1f1b_with_fewer_microbatches_than_ranks_only_warms_up():
    assert words(order("1f1b", 4, 2), 0) == "F0.0 F0.1 B0.0 B0.1"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(GENERATORS)), layouts())
def test_every_schedule_validates_and_trains_the_serial_model(name, layout):
    schedule = build(name, **layout)
    report = validate(schedule)
    assert report.canonical_order == (schedule.header.numerical_class == "A")
    for steps in (1, 3):
        assert run(schedule, steps) == serial(schedule.header, steps)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GENERATORS)), layouts())
def test_forward_mode_holds_forwards_and_activations_alone(name, layout):
    schedule = build(name, mode="forward", **layout)
    validate(schedule)
    ranks, microbatches = layout["num_ranks"], layout["num_microbatches"]
    actions = [action for rank in range(ranks) for action in schedule.actions("body", rank)]
    forwards = {(action.stage, action.microbatch) for action in actions if action.kind == Kind.FORWARD}
    assert len(forwards) == len(schedule.header.stages) * microbatches
    assert {action.kind for action in actions} <= {Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION}


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (4, 8), (8, 3)])
def test_1f1b_keeps_one_activation_a_rank_behind_it(ranks, microbatches):
    peaks = validate(build("1f1b", ranks, microbatches)).peak_activations
    assert peaks == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert validate(build("gpipe", ranks, microbatches)).peak_activations == (microbatches,) * ranks


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ScheduleError, match=r"'1f1c'.*did you mean '1f1b'"):
        build("1f1c", 2, 2)


def test_sizes_below_one_name_the_value():
    with pytest.raises(ScheduleError, match="at least 1 of micro-batches, got 0"):
        check_microbatches("gpipe", 2, 0)
    with pytest.raises(ScheduleError, match="at least 1 of pipeline ranks, got 0"):
        build("gpipe", 0, 2)


def test_units_and_tied_groups_must_fit_the_stages():
    with pytest.raises(ScheduleError, match="each of 2 stages"):
        build("gpipe", 2, 2, units_per_stage=[1])
    with pytest.raises(ScheduleError, match="stages from 0 to 1"):
        build("gpipe", 2, 2, tied_groups=[(0, 2)])


def test_every_generator_cites_its_source():
    for generator in GENERATORS.values():
        assert "arXiv" in (generator.order.__doc__ or ""), generator.name
