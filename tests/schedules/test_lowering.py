"""Actions that lowering adds, their places, and refusals."""

import numpy as np
import pytest

from megapipe.schedules import Header, Kind, Schedule, ScheduleError, StagePlace, build, loads, lower, order, validate
from megapipe.schedules.actions import VERSION
from megapipe.schedules.table import Table
from tests.schedules.support import words


def test_two_ranks_by_hand():
    schedule = build("1f1b", 2, 2)
    assert words(schedule, 0) == ("DC.1 F0.0 SA0.0 RG0.0 F0.1 SA0.1 RG0.1 B0.0 B0.1 DS.1 U0/0.1")
    assert words(schedule, 1) == "DC.1 RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 B1.1 SG1.1 DS.1 U1/0.1"


def test_data_parallelism_reduces_after_each_last_unit():
    schedule = build("gpipe", 1, 2, units_per_stage=[3], data_parallel=True)
    assert words(schedule, 0) == (
        "DC.1 F0.0 F0/0.1 F0/1.1 F0/2.1 B0.0 B0/2.1 DG0/2.1 B0/1.1 DG0/1.1 B0/0.1 DG0/0.1 DS.1 U0/0.1 U0/1.1 U0/2.1"
    )


def test_tied_weights_are_reduced_and_updated_once_per_rank():
    schedule = build("gpipe", 2, 1, tied_groups=[(0, 1)])
    assert words(schedule, 0).endswith("B0.0 DT0/1.0 DS.0 U0/0.0 U0/1.0")
    assert words(schedule, 1).endswith("B1.0 SG1.0 DT1/1.0 DS.0 U1/0.0 U1/1.0")
    one_rank = build("gpipe", 1, 1, tied_groups=[(0,)])
    assert words(one_rank, 0).endswith("B0.0 DT0/1.0 DS.0 U0/0.0 U0/1.0")


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_receives_are_posted_that_many_compute_actions_early(distance):
    schedule = build("gpipe", 2, 8, receive_ahead=distance)
    actions = list(schedule.actions("body", 1))
    compute = 0
    posted, used = {}, {}
    for action in actions:
        if action.kind == Kind.RECV_ACTIVATION:
            posted[action.microbatch] = compute
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
            if action.kind == Kind.FORWARD:
                used[action.microbatch] = compute
            compute += 1
    assert all(posted[k] == max(used[k] - distance, used[max(k - 1, 0)]) for k in range(8))


def test_slots_are_as_few_as_the_order_allows():
    header = build("1f1b", 4, 16).header
    assert header.activation_slots == (0, 4, 3, 2)  # kept until the backward, and one early receive
    assert header.gradient_slots == (2, 2, 2, 0)
    assert build("gpipe", 2, 16, mode="forward").header.activation_slots == (0, 2)


def test_versions_count_from_the_step():
    first, second = (
        {
            int(row[VERSION])
            for row in build("1f1b", 2, 4).expand(2)[0].tolist()
            if row[0] == Kind.FORWARD and low <= row[3] < low + 4
        }
        for low in (0, 4)
    )
    assert (first, second) == ({0}, {1})


def test_receives_move_forward_where_sends_would_hang():
    """Two ranks that each send before the other has posted: posting one action early is too late for both."""
    text = """megapipe schedule 1
        name crossing
        microbatches 4
        stage 0 rank 0
        stage 1 rank 1
        stage 2 rank 1
        stage 3 rank 0
        route 0 1
        route 2 3
        body
        rank 0: F0.0 F0.2 F3.1 F3.3 B3.1 B3.3 B0.0 B0.2
        rank 1: F2.1 F2.3 F1.0 F1.2 B1.0 B1.2 B2.1 B2.3
        """
    schedule = lower(loads(text))
    validate(schedule)
    assert words(schedule, 0).index("RA3.1") < words(schedule, 0).index("SA0.0")
    hand_made = words(schedule, 0).split()
    assert hand_made.index("F3.1") - hand_made.index("RA3.1") > 3


def test_what_does_not_fit_together_is_refused():
    circle = """megapipe schedule 1
        name circle
        microbatches 1
        stage 0 rank 0
        stage 1 rank 1
        body
        rank 0: B0.0 F0.0
        rank 1: F1.0 B1.0
        """
    with pytest.raises(ScheduleError, match=r"circle deadlocks.*rank 0"):
        lower(loads(circle))
    with pytest.raises(ScheduleError, match="FORWARD stage 0, micro-batch 0: no stage takes its output"):
        lower(loads(circle.replace("F1.0 B1.0", "")))
    with pytest.raises(ScheduleError, match="lowering adds them"):
        lower(loads(circle.replace("B0.0 F0.0", "F0.0 SA0.0 B0.0")))
    with pytest.raises(ScheduleError, match="already lowered"):
        lower(build("gpipe", 2, 2))
    with pytest.raises(ScheduleError, match="receive_ahead is 0"):
        lower(order("gpipe", 2, 2), receive_ahead=0)


def test_neighbours_come_from_the_route():
    header = Header(
        name="routes", mode="train", num_ranks=2, num_microbatches=2,
        stages=(StagePlace(0, 0, 0), StagePlace(1, 0, 1), StagePlace(0, 1, 1), StagePlace(1, 1, 0)),
        routes=((0, 1), (2, 3)), units_per_stage=(1,) * 4, numerical_class="C", versions_per_stage=(1,) * 4,
    )  # fmt: skip
    schedule = Schedule(header, order("gpipe", 2, 2).sections)
    assert [schedule.next_stage(0, 0), schedule.next_stage(0, 1), schedule.next_stage(2, 1)] == [1, None, 3]
    assert [schedule.previous_stage(1, 0), schedule.previous_stage(3, 1), schedule.previous_stage(0, 0)] == [
        0,
        2,
        None,
    ]
    assert header.stages_on(1) == (1, 2)


def test_unrolling_numbers_microbatches_through():
    table = Table.unroll(build("gpipe", 2, 3), 2)
    forwards = table.rows_with(Kind.FORWARD)
    for rank in range(2):
        assert table.microbatch[forwards[table.rank[forwards] == rank]].tolist() == list(range(6))
    assert np.array_equal(table.offsets, [0, len(table.rows) // 2, len(table.rows)])
