"""Formulas of bubbles beside simulation of the lowered schedule: even stages, no messages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.cost.pipeline_time import FORMULAS, ChunkTimes, waiting_of
from megapipe.schedules import build, rank_costs, simulate
from megapipe.schedules.simulation import Link


def even(ranks: int, chunks: int, forward: float, half: float, weight: float, hop: float = 0.0) -> ChunkTimes:
    shape = (chunks, ranks)
    return ChunkTimes(
        np.full(shape, forward / chunks),
        np.zeros(shape),
        np.full(shape, half / chunks),
        np.full(shape, weight / chunks),
        np.full(ranks, hop),
    )


def simulated(name: str, ranks: int, count: int, chunks: int, times: tuple[float, float, float]) -> float:
    options = {"chunks": chunks} if chunks > 1 and name != "zb_v" else {}
    schedule = build(name, ranks, count, **options)  # type: ignore[arg-type]
    forward, half, weight = times
    costs = rank_costs(schedule.header, forward=forward, backward_input=half, backward_weight=weight)
    return simulate(schedule, costs).finish - count * sum(times)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2),
                                              ("interleaved_1f1b", 4), ("modular", 3), ("zb_h1", 1), ("zb_h2", 1),
                                              ("zb_v", 2)])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.9), (1.0, 2.2, 1.0), (1.3, 1.5, 0.6)])
def test_the_bubble_is_the_simulated_one(
    name: str, chunks: int, ranks: int, rounds: int, times: tuple[float, float, float]
) -> None:
    count = rounds * ranks
    found = waiting_of(name, {}, even(ranks, chunks, *times), count)
    assert found.bubble == pytest.approx(simulated(name, ranks, count, chunks, times), abs=1e-9)
    assert found.messages == 0


@pytest.mark.parametrize(("name", "exact"), [("1f1b", 0.0), ("gpipe", 0.0), ("modular", 0.0), ("zb_h1", 0.0),
                                             ("interleaved_1f1b", 0.06), ("zb_h2", 0.08), ("zb_v", 0.03)])  # fmt: skip
@given(ranks=st.integers(2, 6), count=st.integers(1, 30), forward=st.floats(0.5, 2.0), half=st.floats(0.5, 3.0))
@settings(max_examples=25, deadline=None)
def test_any_number_of_micro_batches(
    name: str, exact: float, ranks: int, count: int, forward: float, half: float
) -> None:
    """From as many micro-batches as ranks on; weight halves as long as forwards. `exact`: of the whole step's time,
    how far a formula may be off where its last group or its warm-up is not full."""
    count = max(count, ranks)
    chunks = 2 if name in ("interleaved_1f1b", "modular", "zb_v") else 1
    times = forward, max(half, forward), forward
    found = waiting_of(name, {}, even(ranks, chunks, *times), count)
    work = count * sum(times)
    assert work + found.bubble == pytest.approx(work + simulated(name, ranks, count, chunks, times), rel=exact + 1e-9)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("modular", 2),
        ("zb_h1", 1),
        ("zb_h2", 1),
        ("zb_v", 2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_messages_are_waited_for_as_simulated(name: str, chunks: int, ranks: int, rounds: int) -> None:
    """Of 1F1B c (2 (p - 1) ceil(m / p) + 2 (p - 2)): the way there and back of p micro-batches. Messages shorter than
    a forward; the number of them on the critical path is what is compared."""
    options = {"chunks": chunks} if chunks > 1 and name != "zb_v" else {}
    schedule = build(name, ranks, rounds * ranks, **options)  # type: ignore[arg-type]
    seconds = [
        simulate(schedule, rank_costs(schedule.header, backward_input=1.0, backward_weight=1.0, link=link)).finish
        for link in (Link(latency=0.02), Link())
    ]
    found = waiting_of(name, {}, even(ranks, chunks, 1.0, 1.0, 1.0, 0.02), rounds * ranks)
    assert found.messages == pytest.approx(seconds[0] - seconds[1], abs=1e-9)


@pytest.mark.parametrize("options", [{"two_bp": True}, {"two_bp": True, "max_pending": 2}])
def test_a_schedule_without_a_formula_is_simulated_small_and_drawn_on(options: dict[str, int]) -> None:
    times = 1.0, 1.2, 0.8
    found = waiting_of("1f1b", options, even(4, 1, *times), 40)  # type: ignore[arg-type]
    schedule = build("1f1b", 4, 40, **options)  # type: ignore[arg-type]
    costs = rank_costs(schedule.header, forward=1.0, backward_input=1.2, backward_weight=0.8)
    assert 120 + found.bubble == pytest.approx(simulate(schedule, costs).finish, rel=0.01)
    assert "simulated" in found.source


@given(
    name=st.sampled_from(sorted(FORMULAS)),
    ranks=st.integers(1, 8),
    count=st.integers(1, 40),
    spread=st.floats(0.0, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_waiting_is_never_negative_and_a_slower_rank_never_makes_a_step_faster(
    name: str, ranks: int, count: int, spread: float
) -> None:
    chunks = 2 if name in ("interleaved_1f1b", "modular", "zb_v") else 1
    plain = even(ranks, chunks, 1.0, 1.0, 1.0)
    slow = plain.forward.copy()
    slow[0, 0] += spread
    slower = ChunkTimes(slow, plain.again, plain.input_half, plain.weight_half, plain.hops)
    totals = []
    for pipeline in (plain, slower):
        found = waiting_of(name, {}, pipeline, count)
        assert min(found.bubble, found.messages) >= 0
        totals.append(count * float(pipeline.work.max()) + found.bubble)
    assert totals[1] >= totals[0] - 1e-9
