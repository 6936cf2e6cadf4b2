"""Each invariant, broken once: the error names the rank, the action and what it waits for, and shows the rows."""

from dataclasses import replace

import pytest

from megapipe.schedules import ScheduleError, build, dumps, loads, lower, order, validate
from tests.schedules.support import with_rank_rows


def broken(old: str, new: str, **arguments: object) -> str:
    """The error for 1f1b on two ranks with one stretch of its text replaced."""
    text = dumps(build("1f1b", 2, 2, **arguments))  # type: ignore[arg-type]
    assert text.count(old) == 1, text
    with pytest.raises(ScheduleError) as error:
        validate(loads(text.replace(old, new)))
    return error.value.shown


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("F1.0@0^0 ", "", ["rank 1", "FORWARD stage 1, micro-batch 0", "never happens"]),
        ("F1.0@0^0", "F1.0@0^0 F1.0@0^0", ["FORWARD", "second time"]),
        ("B0.0@0^0", "BI0.0@0^0", ["BACKWARD_WEIGHT stage 0, micro-batch 0", "never happens"]),
        ("B0.0@0^0", "B0.0@0^0 BI0.0@0^0 BW0.0@0", ["whole and in halves"]),
        ("B0.0@0^0", "B0/0.0@0^0", ["both be whole or both be in units"]),
        ("B0.0@0^0", "BW0.0@0 BI0.0@0^0", ["BACKWARD_WEIGHT", "needs BACKWARD_INPUT", "comes after"]),
        ("SA0.1 ", "", ["SEND_ACTIVATION stage 0, micro-batch 1", "never happens"]),
        ("SA0.0", "SA0.0 SA0.0", ["second time"]),
        ("RA1.0^0 F1.0@0^0", "F1.0@0^0 RA1.0^0", ["needs RECV_ACTIVATION", "comes after"]),
        ("F0.0@0 SA0.0", "SA0.0 F0.0@0", ["needs FORWARD", "comes after"]),
        ("DC.1 RA1.0^0", "RA1.0^0", ["rank 1", "REDUCE_COUNTS micro-batch 1", "never happens"]),
        ("DS.1 U0/0.1@1", "U0/0.1@1 DS.1", ["UPDATE", "needs REDUCE_SCALARS"]),
        ("B0.1@0^1 DS.1", "DS.1 B0.1@0^1", ["REDUCE_SCALARS", "needs BACKWARD"]),
        ("F0.1@0", "F0.1@1", ["update 0 reads version 0"]),
        ("U0/0.1@1", "U0/0.1@0", ["update 0 writes version 1"]),
        ("U0/0.1@1", "U0/1.1@1", ["keeps no such state"]),
        ("U0/0.1@1", "U0/0.0@1", ["last micro-batch that it includes"]),
        ("RA1.1^1", "RA1.1^0", ["slot is used by micro-batch 0 until BACKWARD"]),
        ("RA1.1^1", "RA1.1^2", ["has 2 slots"]),
        ("F1.1@0^1", "F1.1@0^0", ["slot 1 was filled for it"]),
        ("F0.0@0 ", "F0.0@0^0 ", ["reads no receive buffer"]),
        ("F0.0@0 ", "F1.0@0 ", ["stage 1 is on rank 1"]),
        ("F0.0@0 ", "F2.0@0 ", ["there are 2 stages"]),
        ("F0.0@0 ", "F0.2@0 ", ["micro-batches are numbered from 0 to 1"]),
        ("F0.0@0 ", "F0/1.0@0 ", ["fewer units"]),
        ("F0.0@0 ", "F0.0 ", ["version must be given"]),
        ("SA0.0", "SA0.0^1", ["slot must be unused"]),
    ],
)
def test_each_broken_invariant_is_named(old, new, expected):
    message = broken(old, new)
    for part in ("1f1b", *expected):
        assert part in message
    assert "rank " in message


def test_the_rows_around_the_fault_are_shown():
    message = broken("DS.1 U0/0.1@1", "U0/0.1@1 DS.1")
    marked, caret = message.splitlines()[2:4]
    assert "> " in marked
    assert marked[caret.index("^") :].startswith("U0/0.1@1 DS.1")
    lowered = build("1f1b", 2, 2)
    rows = lowered.sections.body[0]
    with pytest.raises(ScheduleError, match=r"\n  > +\d+  U0/0.1@1\n"):
        validate(with_rank_rows(lowered, "body", 0, rows[[*range(len(rows) - 2), -1, -2]]))


def test_units_missing_reductions_and_tied_sums():
    arguments = {"units_per_stage": [2, 2], "data_parallel": True, "tied_groups": [(0, 1)]}
    assert "units are missing" in broken("F0/1.1@0 ", "", **arguments)
    assert "needs FORWARD stage 1, unit 0" in broken("F1/0.1@0^1 F1/1.1@0 ", "F1/1.1@0 F1/0.1@0^1 ", **arguments)
    assert "never happens" in broken("DG0/1.1 ", "", **arguments)
    assert "needs REDUCE_GRADIENTS" in broken("DG0/0.1 DT0/2.1 DS.1", "DT0/2.1 DS.1 DG0/0.1", **arguments)
    assert "REDUCE_TIED" in broken("DT1/2.1 ", "", **arguments)


def test_receives_out_of_order_are_refused():
    text = dumps(build("gpipe", 2, 3, receive_ahead=2))
    assert "RA1.0^0 RA1.1^1" in text
    with pytest.raises(ScheduleError, match="must be posted in the order of the sends"):
        validate(loads(text.replace("RA1.0^0 RA1.1^1", "RA1.1^1 RA1.0^0")))


def test_a_deadlock_under_blocking_sends_names_the_cycle():
    text = dumps(build("1f1b", 2, 2)).replace("SA0.1 RG0.1^1", "SA0.1").replace("B0.0@0^0", "B0.0@0^0 RG0.1^1")
    validate(loads(text))
    late = dumps(build("1f1b", 2, 4))
    late = late.replace("RG0.0^0 F0.1@0 SA0.1", "F0.1@0 SA0.1 RG0.0^0").replace(
        "RA1.1^1 B1.0@0 SG1.0", "B1.0@0 SG1.0 RA1.1^1"
    )
    with pytest.raises(ScheduleError) as error:
        validate(loads(late))
    message = str(error.value)
    assert "ranks 0, 1 wait for each other" in message
    assert "SA0.1 of rank 0 (schedule, line 10) waits for RA1.1, which comes after SG1.0 of rank 1 (" in message
    assert "SG1.0 of rank 1 (schedule, line 11), which waits for RG0.0, which comes after SA0.1;" in message


def test_collectives_start_in_one_order():
    schedule = build("gpipe", 2, 1, tied_groups=[(0, 1), (0, 1)])
    text = dumps(schedule)
    swapped = text.replace("DT1/1.0 DT1/2.0", "DT1/2.0 DT1/1.0")
    assert swapped != text
    with pytest.raises(ScheduleError, match=r"rank 1 \(.*\), REDUCE_TIED.*rank 0 starts REDUCE_TIED stage 0, unit 1"):
        validate(loads(swapped))


def test_the_activation_budget():
    schedule = build("gpipe", 2, 8)
    validate(schedule, activation_budget=8)
    with pytest.raises(ScheduleError, match="8 micro-batches of activations on rank 0, above the budget of 4"):
        validate(schedule, activation_budget=4)


def test_gradients_out_of_order_are_valid_but_reported():
    text = dumps(order("gpipe", 1, 2)).replace("B0.0 B0.1", "B0.1 B0.0")
    assert not validate(lower(loads(text.replace("class A", "class C")))).canonical_order


def test_only_lowered_schedules_are_validated():
    with pytest.raises(ScheduleError, match="lower it"):
        validate(order("gpipe", 2, 2))


def test_a_header_that_contradicts_itself_is_refused():
    schedule = build("gpipe", 2, 2)
    for change, message in (
        ({"routes": ((0,),)}, "stage 1 is on no route"),
        ({"routes": ((0, 2),)}, "route"),
        ({"units_per_stage": (1,)}, "units_per_stage"),
        ({"versions_per_stage": (1, 0)}, "versions_per_stage"),
        ({"tied_groups": ((0, 5),)}, "tied group"),
        ({"num_ranks": 3}, "rank 2"),
    ):
        with pytest.raises(ScheduleError, match=message):
            validate(replace(schedule, header=replace(schedule.header, **change)))
