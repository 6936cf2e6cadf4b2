"""Recomputation: recomputed units, their places, and the kept activations of a rank."""

import pytest

from megapipe.schedules import ScheduleError, build, loads, rank_costs, simulate, validate
from megapipe.schedules.text import dumps
from tests.schedules.support import words


def test_each_span_is_recomputed_before_its_last_units_backward():
    schedule = build("1f1b", 1, 1, units_per_stage=[4], recompute=[[range(1), range(1, 3)]])
    assert words(schedule, 0).removeprefix("DC.0 ").partition(" DS")[0] == (
        "F0/0.0 F0/1.0 F0/2.0 F0/3.0 B0/3.0 R0/1.0 R0/2.0 B0/2.0 B0/1.0 R0/0.0 B0/0.0"
    )


def test_split_backwards_recompute_before_their_input_half():
    schedule = build("zb_h1", 1, 1, units_per_stage=[2], recompute=[[range(2)]])
    order = [word for word in words(schedule, 0).split() if word[:2] in ("BI", "BW", "R0")]
    assert order == ["R0/0.0", "R0/1.0", "BI0/1.0", "BI0/0.0", "BW0/1.0", "BW0/0.0"]


def test_activations_are_those_of_what_ran_again():
    units = [4] * 4
    plain = validate(build("1f1b", 4, 8, units_per_stage=units))
    each = validate(build("1f1b", 4, 8, units_per_stage=units, recompute=[[range(n, n + 1) for n in range(4)]] * 4))
    assert plain.peak_activations == (4.0, 3.0, 2.0, 1.0)
    assert each.peak_activations == (0.25,) * 4
    half = validate(build("gpipe", 2, 3, units_per_stage=units[:2], recompute=[[range(2)], []]))
    assert half.peak_activations == (1.5, 3.0)  # the other half's backward comes first


def test_running_everything_again_takes_a_forward_more():
    schedule = build("1f1b", 4, 8, units_per_stage=[2] * 4, recompute=[[range(2)]] * 4)
    plain = simulate(build("1f1b", 4, 8), rank_costs(schedule.header))
    again = simulate(schedule, rank_costs(schedule.header))
    assert (plain.ideal, again.ideal) == (24.0, 32.0)
    # A rank that waits for its gradient has recomputed before it arrives: only one rank's rounds are added.
    assert again.finish <= plain.finish + 8.0
    assert simulate(schedule, rank_costs(schedule.header, recompute=2.0)).ideal == 40.0


def test_spans_are_checked():
    for spans, message in (
        ([[range(1)]], "spans for 1 stages, but there are 2"),
        ([[range(3)], []], "from 0 to 1"),
        ([[range(2), range(1, 2)], []], "after the previous span"),
        ([[range(0), range(1)], []], "one or more consecutive units"),
        ([[range(0, 2, 2)], []], "consecutive units"),
    ):
        with pytest.raises(ScheduleError, match=message):
            build("1f1b", 2, 2, units_per_stage=[2, 2], recompute=spans)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" R0/0.0@0", " R0/0.0@0 R0/0.0@0", "a second time"),
        (" R0/0.0@0", " R0.0@0", "no forward of this chunk or unit"),
        (" R0/0.0@0 B0/0.0@0", " B0/0.0@0 R0/0.0@0", "comes after it"),
        (" F0/0.0@0 R0/0.0@0", " R0/0.0@0 F0/0.0@0", "comes after it"),
        (" R0/0.0@0", " R0/0.0@1", "reads version 0"),
    ],
)
def test_what_runs_again_is_validated(old, new, message):
    text = dumps(build("1f1b", 1, 1, recompute=[[range(1)]]))
    validate(loads(text))
    assert old in text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new, 1)))
