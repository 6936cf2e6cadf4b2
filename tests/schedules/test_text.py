"""The text form: written files read back the same, and errors name the line and column."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Action, Kind, ScheduleError, build, dumps, loads, lower, validate
from megapipe.schedules.actions import read_action, write_action
from tests.schedules.support import schedules

HAND_WRITTEN = """megapipe schedule 1
name mine  # a comment
microbatches 2

stage 0 rank 0 units 2
stage 1 rank 1
body
# all of it is one step
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""

FIELD = st.integers(-1, 2**31 - 1)


@given(st.builds(Action, st.sampled_from(Kind), *[FIELD] * 5, st.just(-1)), st.integers(1, 4))
def test_every_action_reads_back(action, slices):
    action = Action(action.kind, *(field // slices if field > 0 else field for field in action[1:]))
    assert read_action(write_action(action, slices), slices) == action


@settings(max_examples=80, deadline=None)
@given(schedules() | schedules("forward"))
def test_every_schedule_reads_back(schedule):
    text = dumps(schedule)
    assert loads(text) == schedule
    assert dumps(loads(text)) == text


def test_a_hand_written_schedule_runs():
    report = validate(lower(loads(HAND_WRITTEN)))
    assert report.peak_activations == (2.0, 1.0)
    assert report.canonical_order


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message"),
    [
        ("B1.0", "X1.0", 10, 14, "not a kind of action"),
        ("rank 1:", "rank 2:", 10, 1, "expected 'rank 1:'"),
        ("microbatches 2", "microbatches two", 3, 14, "not a whole number from 1 to 999,999,999"),
        ("stage 1 rank 1", "stage 2 rank 1", 6, 7, "expected stage 1"),
        ("stage 1 rank 1", "stage 1 rank 1 unit 2", 6, 16, "'unit' is not one of"),
        ("units 2", "units 0", 5, 22, "not a whole number from 1 to 999,999,999"),
        ("body", "route 0 5\nbody", 7, 9, "stage 5 is not defined"),
        ("body", "route 0 0\nbody", 7, 1, "must visit each stage once"),
        ("body", "mode both\nbody", 7, 6, "not one of train, forward"),
        ("body", "body\nbody", 7, 1, "has 0 rank lines"),
        ("megapipe schedule 1", "megapipe schedule 9", 1, 19, "format 9 cannot"),
    ],
)
def test_errors_name_line_and_column(old, new, line, column, message):
    with pytest.raises(ScheduleError, match=message) as error:
        loads(HAND_WRITTEN.replace(old, new, 1), "mine.txt")
    assert f"mine.txt, line {line}, column {column}:" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line must be"),
        ("schedule 1\n", "first line must be"),
        (HAND_WRITTEN.replace("name mine", ""), "lacks 'name'"),
        (HAND_WRITTEN.replace("microbatches 2", ""), "lacks 'microbatches'"),
        (HAND_WRITTEN[: HAND_WRITTEN.index("body")], "the section 'body' is missing"),
    ],
)
def test_errors_of_the_whole_text(text, message):
    with pytest.raises(ScheduleError, match=message):
        loads(text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_texts_are_read_or_refused_with_position(data):
    text = data.draw(st.sampled_from([HAND_WRITTEN, dumps(build("1f1b", 2, 2))]))
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:at] + data.draw(st.text(alphabet="0F.:@^/ \n-x", max_size=2)) + text[at + data.draw(st.integers(0, 3)) :]
    )
    try:
        schedule = loads(damaged)
    except ScheduleError:
        return
    assert loads(dumps(schedule)) == schedule
