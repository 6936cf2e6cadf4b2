"""What is counted of schedules without walking through all of their lowering: beside that, action by action."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.cost.in_flight import most_held
from megapipe.schedules import Kind, order
from megapipe.schedules.actions import KIND, STAGE
from megapipe.schedules.lowering import lower, replica_traffic

CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "modular": 2, "zb_h1": 1, "zb_v": 2}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(CHUNKS)),
    ranks=st.integers(1, 4),
    count=st.integers(1, 9),
    buffers=st.integers(1, 3),
    gradients=st.integers(1, 3),
    numbers=st.randoms(use_true_random=False),
)
def test_traffic_of_replicas_is_that_of_the_whole_lowering(
    name: str, ranks: int, count: int, buffers: int, gradients: int, numbers: object
) -> None:
    stages = ranks * CHUNKS[name]
    units = [numbers.randint(1, 4) for _ in range(stages)]  # type: ignore[attr-defined]
    options = {"chunks": 2} if name in ("interleaved_1f1b", "modular") else {}
    schedule = order(
        name,
        ranks,
        count,
        units_per_stage=units,
        data_parallel=True,
        weight_buffers=buffers,
        whole_gradients=gradients,
        **options,  # type: ignore[arg-type]
    )
    short, whole = replica_traffic(schedule), np.concatenate(lower(schedule).sections.body)
    for kind in (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS, Kind.REDUCE_GRADIENTS, Kind.UPDATE):
        of_kind = (rows[rows[:, KIND] == kind, STAGE] for rows in (short, whole))
        one, other = (np.bincount(each, minlength=stages) for each in of_kind)
        assert (one == other).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["interleaved_1f1b", "zb_h1", "zb_h2", "zb_v"]),
    ranks=st.integers(1, 5),
    count=st.integers(1, 12),
)
def test_fullest_moments_are_those_that_no_other_moment_holds_as_much_as(name: str, ranks: int, count: int) -> None:
    chunks = 2 if name in ("interleaved_1f1b", "zb_v") else 1
    options = {"chunks": 2} if name == "interleaved_1f1b" else {}
    found = most_held(name, ranks, count, chunks, options)  # type: ignore[arg-type]
    schedule = order(name, ranks, min(count, 3 * ranks), **options)  # type: ignore[arg-type]
    for rank, rows in enumerate(schedule.expand(1)):
        own = schedule.header.stages_on(rank)
        held = [0] * (2 * chunks)
        moments = set()
        for kind, stage in rows[:, [KIND, STAGE]].tolist():
            chunk = own.index(stage)
            held[chunk] += (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
            held[chunks + chunk] += (kind == Kind.BACKWARD_INPUT) - (kind == Kind.BACKWARD_WEIGHT)
            moments.add(tuple(held))
        fullest = {
            one
            for one in moments
            if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in moments)
        }
        assert {tuple(int(each) for each in row) for row in found[rank]} == fullest
