"""Whatever is done to one action of a valid schedule is refused, or the schedule still trains the same model, also on
a GPU with one queue."""

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Schedule, ScheduleError, validate
from tests.schedules import streams
from tests.schedules.interpreter import Broken, run
from tests.schedules.serial import serial
from tests.schedules.support import mutations, schedules

IN_ONE_QUEUE = "on a GPU that starts operations in the order of their launch"


def refusal(schedule: Schedule) -> str:
    """The validator's error, empty if it accepts the schedule."""
    try:
        validate(replace(schedule, header=replace(schedule.header, numerical_class="C")))
    except ScheduleError as error:
        return str(error)
    return ""


def fails_in_one_queue(schedule: Schedule) -> bool:
    try:
        streams.run(schedule, 1 if schedule.flushes else 3, lambda rank, stream: 0)
    except (streams.Hang, streams.Mismatch, KeyError):  # KeyError: something is used that was not received yet
        return True
    return False


@settings(max_examples=550, deadline=None)
@given(st.data(), schedules())
def test_changed_schedules_are_refused_or_train_the_same_model(data, schedule):
    mutant = data.draw(mutations(schedule))
    error = refusal(mutant)
    event("refused" if error else "unchanged" if mutant == schedule else "still valid")
    if not error:
        canonical = validate(replace(mutant, header=replace(mutant.header, numerical_class="C"))).canonical_order
        for steps in (1, 2):
            assert run(mutant, steps, ordered=canonical) == serial(mutant.header, steps, ordered=canonical)
    if not error or IN_ONE_QUEUE in error:
        assert fails_in_one_queue(mutant) == bool(error)


@settings(max_examples=150, deadline=None)
@given(st.data(), schedules(max_ranks=3, max_microbatches=3))
def test_schedules_that_hang_or_train_another_model_are_refused(data, schedule):
    """The other way round: what the interpreter finds wrong, the validator refuses."""
    mutant = data.draw(mutations(schedule))
    try:
        wrong = run(mutant, 1, ordered=False) != serial(mutant.header, 1, ordered=False)
    except (Broken, KeyError, IndexError, ValueError, TypeError, AttributeError):
        wrong = True
    event("wrong" if wrong else "right")
    if wrong:
        assert refusal(mutant)


def work(schedule: Schedule) -> list[list[tuple[int, int, int, int]]]:
    """Per rank what is done, sorted; a forward of a whole chunk is one of each of its units."""
    done = []
    for rank in range(schedule.header.num_ranks):
        parts = []
        for kind, stage, unit, microbatch, *_ in schedule.actions("body", rank):
            whole = kind == Kind.FORWARD and unit < 0
            units = range(schedule.header.units_per_stage[stage]) if whole else (unit,)
            parts += [(int(kind), stage, part, microbatch) for part in units]
        done.append(sorted(parts))
    return done


@settings(max_examples=60, deadline=None)
@given(st.data(), schedules("forward"))
def test_a_changed_forward_schedule_never_passes_with_work_missing(data, schedule):
    mutant = data.draw(mutations(schedule))
    if not refusal(mutant):
        assert work(mutant) == work(schedule)
