"""Each rule of the validator, broken once: the error names the rank, the action and what it waits for."""

from dataclasses import replace

import numpy as np
import pytest

from megapipe.schedules import (
    Offload,
    Schedule,
    ScheduleError,
    Sections,
    build,
    dumps,
    loads,
    lower,
    order,
    validate,
)
from megapipe.schedules.actions import GROUP, KIND, Kind
from megapipe.schedules.memory import with_snapshots
from tests.schedules.support import OVERLAPPED, in_host, sharded, with_rank_rows

MOVED = Offload(((0,),), optimizer=True)
BROKEN: list[tuple[Schedule, list[tuple[str, str, str]]]] = [
    (build("1f1b", 2, 2), [
        ("F1.0@0^0 ", "", "1f1b.*rank 1.*FORWARD stage 1, micro-batch 0.*never happens"),
        ("F1.0@0^0", "F1.0@0^0 F1.0@0^0", "1f1b.*rank .*FORWARD.*second time"),
        ("B0.0@0^0", "BI0.0@0^0", "1f1b.*rank .*BACKWARD_WEIGHT stage 0, micro-batch 0.*never happens"),
        ("B0.0@0^0", "B0.0@0^0 BI0.0@0^0 BW0.0@0", "1f1b.*rank .*whole and in halves"),
        ("B0.0@0^0", "B0/0.0@0^0", "1f1b.*rank .*both be whole or both be in units"),
        ("B0.0@0^0", "BW0.0@0 BI0.0@0^0", "1f1b.*rank .*BACKWARD_WEIGHT.*needs BACKWARD_INPUT.*comes after"),
        ("SA0.1 ", "", "1f1b.*rank .*SEND_ACTIVATION stage 0, micro-batch 1.*never happens"),
        ("SA0.0", "SA0.0 SA0.0", "1f1b.*rank .*second time"),
        ("RA1.0^0 F1.0@0^0", "F1.0@0^0 RA1.0^0", "1f1b.*rank .*needs RECV_ACTIVATION.*comes after"),
        ("F0.0@0 SA0.0", "SA0.0 F0.0@0", "1f1b.*rank .*needs FORWARD.*comes after"),
        ("DC.1 RA1.0^0", "RA1.0^0", "1f1b.*rank 1.*REDUCE_COUNTS micro-batch 1.*never happens"),
        ("DS.1 U0/0.1@1", "U0/0.1@1 DS.1", "1f1b.*rank .*UPDATE.*needs REDUCE_SCALARS"),
        ("B0.1@0^1 DS.1", "DS.1 B0.1@0^1", "1f1b.*rank .*REDUCE_SCALARS.*needs BACKWARD"),
        ("F0.1@0", "F0.1@1", "1f1b.*rank .*update 0 reads version 0"),
        ("U0/0.1@1", "U0/0.1@0", "1f1b.*rank .*update 0 writes version 1"),
        ("U0/0.1@1", "U0/1.1@1", "1f1b.*rank .*keeps no such state"),
        ("U0/0.1@1", "U0/0.0@1", "1f1b.*rank .*last micro-batch that it includes"),
        ("RA1.1^1", "RA1.1^0", "1f1b.*rank .*slot is used by micro-batch 0 until BACKWARD"),
        ("RA1.1^1", "RA1.1^2", "1f1b.*rank .*has 2 slots"),
        ("F1.1@0^1", "F1.1@0^0", "1f1b.*rank .*slot 1 was filled for it"),
        ("F0.0@0 ", "F0.0@0^0 ", "1f1b.*rank .*reads no receive buffer"),
        ("F0.0@0 ", "F1.0@0 ", "1f1b.*rank .*stage 1 is on rank 1"),
        ("F0.0@0 ", "F2.0@0 ", "1f1b.*rank .*there are 2 stages"),
        ("F0.0@0 ", "F0.2@0 ", "1f1b.*rank .*micro-batches are numbered from 0 to 1"),
        ("F0.0@0 ", "F0/1.0@0 ", "1f1b.*rank .*fewer units"),
        ("F0.0@0 ", "F0.0 ", "1f1b.*rank .*version must be given"),
        ("SA0.0", "SA0.0^1", "1f1b.*rank .*slot must be unused"),
    ]),
    (build("1f1b", 2, 2, units_per_stage=[2, 2], data_parallel=True, tied_groups=[(0, 1)]), [
        ("F0/1.1@0 ", "", "units are missing"),
        ("F1/0.1@0^1 F1/1.1@0 ", "F1/1.1@0 F1/0.1@0^1 ", "needs FORWARD stage 1, unit 0"),
        ("DG0/1.1 ", "", "never happens"),
        ("DG0/0.1 DT0/2.1 DS.1", "DT0/2.1 DS.1 DG0/0.1", "needs REDUCE_GRADIENTS"),
        ("DT1/2.1 ", "", "REDUCE_TIED"),
    ]),
    (build("gpipe", 2, 3, receive_ahead=2), [
        ("RA1.0^0 RA1.1^1", "RA1.1^1 RA1.0^0", "must be posted in the order of the sends"),
    ]),
    (build("gpipe", 2, 1, tied_groups=[(0, 1), (0, 1)]), [
        (
            "DT1/1.0 DT1/2.0", "DT1/2.0 DT1/1.0",
            r"rank 1 \(.*\), REDUCE_TIED.*rank 0 starts REDUCE_TIED stage 0, unit 1",
        ),
    ]),
    (build("chimera", 2, 2), [
        ("DG3/0.1 ", "", "REDUCE_GRADIENTS stage 3, unit 0, micro-batch 1: it never happens"),
        (
            "DG3/0.1 B0/0.0@0^0 DG0/0.1", "B0/0.0@0^0 DG0/0.1 DG3/0.1",
            "rank 0 starts REDUCE_GRADIENTS stage 0.* at this point",
        ),
        ("DG3/0.1 ", "DG3/0.1 DG3/0.1 ", "it appears a second time"),
    ]),
    (sharded("gpipe", 1, 1, [3], weight_pool=2), [
        ("GW0/1.0@0 F0/0.0@0", "F0/0.0@0", "not gathered here"),
        ("GW0/0.0@0 GW0/1.0@0", "GW0/0.0@0 GW0/0.0@0 GW0/1.0@0", "already gathered"),
        ("LW0/1.0@0 DG0/1.0", "LW0/1.0@0 LW0/1.0@0 DG0/1.0", "not gathered here"),
        ("LW0/0.0@0 GW0/2.0@0", "GW0/2.0@0 LW0/0.0@0", "weight_pool of 2 has no room for it"),
        ("LW0/0.0@0 DG0/0.0", "LW0/0.0@0 GW0/0.0@0 LW0/0.0@0 DG0/0.0", "nothing uses the weights"),
        ("LW0/0.0@0 DG0/0.0", "DG0/0.0", "never released"),
        ("GW0/2.0@0 F0/1.0@0 F0/2.0@0", "F0/1.0@0 F0/2.0@0 GW0/2.0@0", "FORWARD.* not gathered here"),
        ("F0/0.0@0 LW0/0.0@0", "LW0/0.0@0 F0/0.0@0", "FORWARD.* not gathered here"),
        ("B0/1.0@0 LW0/1.0@0", "LW0/1.0@0 B0/1.0@0", "BACKWARD.* not gathered here"),
        ("state 0/0-2 weights sharded", "state 0/0-2", "keeps all weights whole"),
        ("GW0/0.0@0 GW0/1.0@0", "GW0/0.0 GW0/1.0@0", "version must be given"),
    ]),
    (sharded("gpipe", 1, 2, [3], gradient_pool=1), [
        ("DG0/1.0 B0/0.0@0", "B0/0.0@0 DG0/1.0", "gradient_pool of 1 has no room for another"),
        ("DG0/2.1", "DG0/2.0", "last micro-batch that it includes"),
        ("DG0/2.1", "DG0/2.1 DG0/2.1", "nothing was added"),
        (" DG0/0.1", "", "not reduced after it"),
        ("B0/0.1@0 DG0/0.1", "DG0/0.1 B0/0.1@0", "nothing was added"),
        ("B0/2.0@0 DG0/2.0", "DG0/2.0 B0/2.0@0", "nothing was added"),
    ]),
    (build("gpipe", 1, 1, **in_host(3)), [
        ("weights host", "weights sharded", "no rank to gather from"),
        ("weight_pool 2", "weight_pool 0", "needs 1 of the weight_pool for its whole weights, but the pool is 0"),
        ("GW0/1.0@0 F0/0.0@0", "F0/0.0@0", "not gathered here"),
    ]),
    (build("gpipe", 1, 1, **in_host(1)), [
        ("RE0/0.0@1 U0/0.0@1 OF0/0.0@1", "U0/0.0@1", "but this updates them on the device"),
    ]),
    (build("1f1b", 1, 1, units_per_stage=[2], offload=MOVED), [
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
    ]),
    (build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(optimizer=True)), [
        ("U0/0.0@1 OF0/0.0@1 RE0/2.0@1", "RE0/2.0@1 U0/0.0@1 OF0/0.0@1", "state of 2 units is already on the device"),
        (
            "RE0/2.0@1 U0/1.0@1 OF0/1.0@1 U0/2.0@1 OF0/2.0@1", "U0/1.0@1 OF0/1.0@1 U0/2.0@1",
            "the state of other updates moves, but not that of this one",
        ),
    ]),
    (build("1f1b", 1, 2, mode="forward", units_per_stage=[2]), [
        (" F0.0@0", " F0.0@0 OF0.0", "a schedule of mode 'forward' cannot have such actions"),
    ]),
    (with_snapshots(build("1f1b", 1, 1, units_per_stage=[2])), [
        ("SS0/0.0@0 ", "", "but not that of this one"),
        ("SS0/0.0@0 ", "SS0/0.0@0 SS0/0.0@0 ", "second time"),
        ("SS0/0.0@0", "SS0/0.0@1", "version"),
        (
            "SS0/0.0@0 SS0/1.0@0 DC.0 F0.0@0 B0.0@0 DS.0 U0/0.0@1",
            "SS0/1.0@0 DC.0 F0.0@0 B0.0@0 DS.0 U0/0.0@1 SS0/0.0@0", "it needs SNAPSHOT",
        ),
    ]),
    (build("1f1b", 1, 1, recompute=[[range(1)]]), [
        (" R0/0.0@0", " R0/0.0@0 R0/0.0@0", "a second time"),
        (" R0/0.0@0", " R0.0@0", "no forward of this chunk or unit"),
        (" R0/0.0@0 B0/0.0@0", " B0/0.0@0 R0/0.0@0", "comes after it"),
        (" F0/0.0@0 R0/0.0@0", " R0/0.0@0 F0/0.0@0", "comes after it"),
        (" R0/0.0@0", " R0/0.0@1", "reads version 0"),
    ]),
    (build("seq1f1b", 1, 2, slices=2), [
        ("F0.0:1", "F0.0:2", "must name a slice from 0 to 1"),
        ("F0.0:1", "F0.0", "must name a slice"),
        ("slices 2\n", "", "are not sliced; leave out the slice"),
        ("class C", "class A", "because it computes samples in 2 slices"),
        ("F0.0:0@0 F0.0:1@0", "F0.0:1@0 F0.0:0@0", "slice 1, .*it needs FORWARD .*slice 0"),
        ("B0.1:1@0 B0.1:0@0", "B0.1:0@0 B0.1:1@0", "slice 0, .*it needs BACKWARD .*slice 1"),
    ]),
    (build("1f1b", 2, 4, vocabulary=True), [
        ("F5.3@0 B3.0@0", "B3.0@0 F5.3@0", "at this point"),
        ("F2.0@0 ", "", "never happens"),
        ("F4.0@0 ", "", "never happens"),
        ("vocabulary 2 3 4 5", "vocabulary 2 3 5 4", "one on each rank"),
        ("vocabulary 2 3 4 5", "vocabulary 4 5", "which older files lack; write the file again"),
    ]),
    (lower(loads(OVERLAPPED)), [
        ("F0.2@0+B0.0@0^0 SA0.2", "F0.2@0+B0.0@0^0+SA0.2", "only compute actions can be part of a group"),
        ("B0.2@0^0 B0.3@0^1", "B0.2@0^0+B0.4@0^1", "micro-batches are numbered from 0 to 3"),
        ("F1.2@0^0 RA1.3^1 B1.2@0", "RA1.3^1 F1.2@0^0+B1.2@0", "it needs FORWARD stage 1.* part of the same group"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "old", "new", "message"), [(schedule, *row) for schedule, rows in BROKEN for row in rows]
)
def test_each_broken_rule_is_named(schedule: Schedule, old: str, new: str, message: str) -> None:
    text = dumps(schedule)
    validate(loads(text))
    assert old in text, text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new, 1)))


def test_the_rows_around_the_fault_are_shown() -> None:
    lowered = build("1f1b", 2, 2)
    text = dumps(lowered).replace("DS.1 U0/0.1@1", "U0/0.1@1 DS.1")
    with pytest.raises(ScheduleError) as error:
        validate(loads(text))
    marked, caret = error.value.shown.splitlines()[2:4]
    assert "> " in marked
    assert marked[caret.index("^") :].startswith("U0/0.1@1 DS.1")
    rows = lowered.sections.body[0]
    with pytest.raises(ScheduleError, match=r"\n  > +\d+  U0/0.1@1\n"):
        validate(with_rank_rows(lowered, "body", 0, rows[[*range(len(rows) - 2), -1, -2]]))


def test_a_deadlock_under_blocking_sends_names_the_cycle() -> None:
    text = dumps(build("1f1b", 2, 2)).replace("SA0.1 RG0.1^1", "SA0.1").replace("B0.0@0^0", "B0.0@0^0 RG0.1^1")
    validate(loads(text))
    late = dumps(build("1f1b", 2, 4)).replace("RG0.0^0 F0.1@0 SA0.1", "F0.1@0 SA0.1 RG0.0^0")
    late = late.replace("RA1.1^1 B1.0@0 SG1.0", "B1.0@0 SG1.0 RA1.1^1")
    with pytest.raises(ScheduleError) as error:
        validate(loads(late))
    message = str(error.value)
    assert "ranks 0, 1 wait for each other" in message
    assert "SA0.1 of rank 0 (schedule, line 10) waits for RA1.1, which comes after SG1.0 of rank 1 (" in message
    assert "SG1.0 of rank 1 (schedule, line 11), which waits for RG0.0, which comes after SA0.1;" in message


def test_gradients_out_of_order_are_valid_but_reported() -> None:
    text = dumps(order("gpipe", 1, 2)).replace("B0.0 B0.1", "B0.1 B0.0")
    assert not validate(lower(loads(text.replace("class A", "class C")))).canonical_order


def test_rows_of_a_group_are_neighbours() -> None:
    lowered = lower(loads(OVERLAPPED))
    rows = lowered.sections.body[0].copy()
    rows[np.flatnonzero(rows[:, KIND] == Kind.BACKWARD)[-1], GROUP] = 0
    with pytest.raises(ScheduleError, match="the rows of a group must be neighbours, and its number used once"):
        validate(replace(lowered, sections=Sections.flushing((rows, lowered.sections.body[1]))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lowered": False}, "lower it"),
        ({"routes": ((0,),)}, "stage 1 is on no route"),
        ({"routes": ((0, 2),)}, "route"),
        ({"units_per_stage": (1,)}, "units_per_stage"),
        ({"versions_per_stage": (1, 0)}, "versions_per_stage"),
        ({"tied_groups": ((0, 5),)}, "tied group"),
        ({"num_ranks": 3}, "rank 2"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: dict, message: str) -> None:
    schedule = build("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, header=replace(schedule.header, **change)))
