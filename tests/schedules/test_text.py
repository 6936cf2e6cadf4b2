"""The text form: written files read back the same, and damaged ones are read or refused."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Action, Kind, ScheduleError, build, dumps, loads, lower, validate
from megapipe.schedules.actions import read_action, write_action
from megapipe.schedules.parameters import FileParameters
from tests.schedules.support import schedules
from tests.schedules.test_parameters import OWN, PIPEDREAM, TEXTS

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


DAMAGED = [
    *((text, FileParameters()) for text in (HAND_WRITTEN, dumps(build("1f1b", 2, 2)))),
    *((text, FileParameters(2, 4)) for text in (OWN, PIPEDREAM, TEXTS["interleaved_1f1b"])),
]


@settings(max_examples=600, deadline=None)
@given(st.data(), st.sampled_from(DAMAGED))
def test_damaged_texts_are_read_or_refused(data, text_and_sizes):
    text, sizes = text_and_sizes
    at = data.draw(st.integers(0, len(text) - 1))
    junk = data.draw(st.text(alphabet="0Fpxif.:,@^/%*-(){} \n", max_size=3))
    try:
        schedule = loads(text[:at] + junk + text[at + data.draw(st.integers(0, 4)) :], sizes=sizes)
    except ScheduleError:
        return
    assert loads(dumps(schedule)) == schedule
