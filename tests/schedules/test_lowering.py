"""Actions that lowering adds, and their places: by hand, with recomputation, and refusals."""

import pytest

from megapipe.schedules import (
    Kind,
    Offload,
    Schedule,
    ScheduleError,
    build,
    loads,
    lower,
    rank_costs,
    simulate,
    validate,
)
from tests.schedules.support import in_host, sharded, words

BY_HAND: dict[str, tuple[Schedule, tuple[str, ...]]] = {
    "two ranks": (build("1f1b", 2, 2), (
        "DC.1 F0.0 SA0.0 RG0.0 F0.1 SA0.1 RG0.1 B0.0 B0.1 DS.1 U0/0.1",
        "DC.1 RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 B1.1 SG1.1 DS.1 U1/0.1",
    )),
    "reductions after each last unit": (build("gpipe", 1, 2, units_per_stage=[3], data_parallel=True), (
        "DC.1 F0.0 F0/0.1 F0/1.1 F0/2.1 B0.0 B0/2.1 DG0/2.1 B0/1.1 DG0/1.1 B0/0.1 DG0/0.1 DS.1 U0/0.1 U0/1.1 U0/2.1",
    )),
    "one sum and update of tied weights on a rank": (build("gpipe", 2, 1, tied_groups=[(0, 1)]), (
        "DC.0 RG0.0 F0.0 SA0.0 B0.0 DT0/1.0 DS.0 U0/0.0 U0/1.0",
        "DC.0 RA1.0 F1.0 B1.0 SG1.0 DT1/1.0 DS.0 U1/0.0 U1/1.0",
    )),
    "tied weights of one rank": (build("gpipe", 1, 1, tied_groups=[(0,)]), (
        "DC.0 F0.0 B0.0 DT0/1.0 DS.0 U0/0.0 U0/1.0",
    )),
    "slices": (build("seq1f1b", 1, 2, slices=2), (
        "DC.1:1 F0.0:0 F0.0:1 B0.0:1 F0.1:0 B0.0:0 F0.1:1 B0.1:1 B0.1:0 DS.1:1 U0/0.1:1",
    )),
    "one buffer for gathered weights": (sharded("gpipe", 1, 1, [3], weight_pool=1), (
        "DC.0 GW0/0.0 F0/0.0 LW0/0.0 GW0/1.0 F0/1.0 LW0/1.0 GW0/2.0 F0/2.0 B0/2.0 LW0/2.0 DG0/2.0 GW0/1.0 B0/1.0 "
        "LW0/1.0 DG0/1.0 GW0/0.0 B0/0.0 LW0/0.0 DG0/0.0 DS.0 U0/0.0 U0/1.0 U0/2.0",
    )),
    "two buffers for gathered weights": (sharded("gpipe", 1, 1, [3], weight_pool=2), (
        "DC.0 GW0/0.0 GW0/1.0 F0/0.0 LW0/0.0 GW0/2.0 F0/1.0 F0/2.0 B0/2.0 LW0/2.0 DG0/2.0 GW0/0.0 B0/1.0 LW0/1.0 "
        "DG0/1.0 B0/0.0 LW0/0.0 DG0/0.0 DS.0 U0/0.0 U0/1.0 U0/2.0",
    )),
    "one buffer for sharded gradients": (sharded("gpipe", 1, 2, [3], gradient_pool=1), (
        "DC.1 F0/0.0 F0/1.0 F0/2.0 F0/0.1 F0/1.1 F0/2.1 B0/2.0 DG0/2.0 B0/1.0 DG0/1.0 B0/0.0 DG0/0.0 B0/2.1 DG0/2.1 "
        "B0/1.1 DG0/1.1 B0/0.1 DG0/0.1 DS.1 U0/0.1 U0/1.1 U0/2.1",
    )),
    "evaluation with weights in host memory": (build("1f1b", 1, 2, mode="forward", **in_host(3)), (
        "GW0/0.0 GW0/1.0 F0/0.0 LW0/0.0 GW0/2.0 F0/1.0 LW0/1.0 GW0/0.1 F0/2.0 LW0/2.0 GW0/1.1 F0/0.1 LW0/0.1 GW0/2.1 "
        "F0/1.1 LW0/1.1 F0/2.1 LW0/2.1",
    )),
    "each span recomputed before its last unit's backward": (
        build("1f1b", 1, 1, units_per_stage=[4], recompute=[[range(1), range(1, 3)]]), (
        "DC.0 F0/0.0 F0/1.0 F0/2.0 F0/3.0 B0/3.0 R0/1.0 R0/2.0 B0/2.0 B0/1.0 R0/0.0 B0/0.0 "
        "DS.0 U0/0.0 U0/1.0 U0/2.0 U0/3.0",
    )),
    "recomputation before the input half": (build("zb_h1", 1, 1, units_per_stage=[2], recompute=[[range(2)]]), (
        "DC.0 F0/0.0 F0/1.0 R0/0.0 R0/1.0 BI0/1.0 BI0/0.0 BW0/1.0 BW0/0.0 DS.0 U0/0.0 U0/1.0",
    )),
    "units that leave after their forward": (
        build("1f1b", 1, 1, units_per_stage=[4], offload=Offload(((0, 1, 2, 3),))), (
        "DC.0 F0/0.0 OF0/0.0 F0/1.0 OF0/1.0 F0/2.0 OF0/2.0 F0/3.0 RE0/2.0 B0/3.0 RE0/1.0 B0/2.0 RE0/0.0 B0/1.0 B0/0.0 "
        "DS.0 U0/0.0 U0/1.0 U0/2.0 U0/3.0",
    )),
    "units that would return at once do not leave": (
        build("1f1b", 1, 1, units_per_stage=[4], offload=Offload(((0, 1, 2, 3),), prefetch=4)), (
        "DC.0 F0/0.0 OF0/0.0 F0/1.0 F0/2.0 RE0/0.0 F0/3.0 B0/3.0 B0/2.0 B0/1.0 B0/0.0 "
        "DS.0 U0/0.0 U0/1.0 U0/2.0 U0/3.0",
    )),
    "reloads before recomputed units": (
        build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(((0,),)), recompute=[[range(1, 2)]]), (
        "DC.0 F0/0.0 OF0/0.0 F0/1.0 F0/2.0 B0/2.0 RE0/0.0 R0/1.0 B0/1.0 B0/0.0 DS.0 U0/0.0 U0/1.0 U0/2.0",
    )),
    "reloads before the input half": (build("zb_h1", 1, 1, units_per_stage=[2], offload=Offload(((0,),))), (
        "DC.0 F0/0.0 OF0/0.0 F0/1.0 RE0/0.0 BI0/1.0 BI0/0.0 BW0/1.0 BW0/0.0 DS.0 U0/0.0 U0/1.0",
    )),
    "the optimizer state of two units": (build("1f1b", 1, 1, units_per_stage=[3], offload=Offload(optimizer=True)), (
        "DC.0 F0.0 B0.0 DS.0 RE0/0.0 RE0/1.0 U0/0.0 OF0/0.0 RE0/2.0 U0/1.0 OF0/1.0 U0/2.0 OF0/2.0",
    )),
    "evaluation moves nothing": (
        build("1f1b", 1, 2, mode="forward", units_per_stage=[2], offload=Offload(((0, 1),), optimizer=True)), (
        "F0.0 F0.1",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_lowered_orders_are_those_written_by_hand(name):
    schedule, expected = BY_HAND[name]
    assert tuple(words(schedule, rank) for rank in range(schedule.header.num_ranks)) == expected


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_receives_are_posted_that_many_compute_actions_early(distance):
    compute, posted, used = 0, {}, {}
    for action in build("gpipe", 2, 8, receive_ahead=distance).actions("body", 1):
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


CROSSING = """megapipe schedule 1
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


def test_receives_move_forward_where_sends_would_hang():
    """Two ranks that each send before the other has posted: posting one action early is too late for both."""
    schedule = lower(loads(CROSSING))
    validate(schedule)
    placed = words(schedule, 0).split()
    assert placed.index("RA3.1") < placed.index("SA0.0")
    assert placed.index("F3.1") - placed.index("RA3.1") > 3


CIRCLE = """megapipe schedule 1
name circle
microbatches 1
stage 0 rank 0
stage 1 rank 1
body
rank 0: B0.0 F0.0
rank 1: F1.0 B1.0
"""


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (loads(CIRCLE), r"circle.*rank 0.* needs FORWARD stage 0.* move F0.0 before it"),
        (loads(CIRCLE.replace("F1.0 B1.0", "")), "FORWARD stage 1, micro-batch 0: it never happens; add F1.0"),
        (loads(CIRCLE.replace("B0.0 F0.0", "F0.0 SA0.0 B0.0")), "give only forwards and backwards"),
        (build("gpipe", 2, 2), "already lowered"),
    ],
)
def test_what_cannot_be_lowered_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        lower(schedule)


def test_activations_are_those_of_recomputed_units():
    units = [4] * 4
    each = validate(build("1f1b", 4, 8, units_per_stage=units, recompute=[[range(n, n + 1) for n in range(4)]] * 4))
    assert each.peak_activations == (0.25,) * 4
    half = validate(build("gpipe", 2, 3, units_per_stage=units[:2], recompute=[[range(2)], []]))
    assert half.peak_activations == (1.5, 3.0)  # the other half's backward comes first


def test_recomputing_everything_takes_a_forward_more():
    schedule = build("1f1b", 4, 8, units_per_stage=[2] * 4, recompute=[[range(2)]] * 4)
    plain = simulate(build("1f1b", 4, 8), rank_costs(schedule.header))
    again = simulate(schedule, rank_costs(schedule.header))
    assert (plain.ideal, again.ideal) == (24.0, 32.0)
    # A rank that waits for its gradient has recomputed before it arrives: only one rank's rounds are added.
    assert again.finish <= plain.finish + 8.0
    assert simulate(schedule, rank_costs(schedule.header, recompute=2.0)).ideal == 40.0
