"""How often to save: the published rule, and what a run with a simulated clock loses."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.checkpoint.frequency import FIRST_SAVE_STEPS, SaveTimer, interval


class Simulated(NamedTuple):
    """Result of a run. saved: the steps with a save. seconds: of each step, with the stall of a save after it."""

    saved: list[int]
    seconds: list[float]


def simulate(
    timer: SaveTimer,
    steps: int,
    step_seconds: Callable[[int], float],
    stall: float,
    persist: Callable[[int], float],
    slowdown: float = 1.0,
) -> Simulated:
    """Simulate a run. persist: seconds after the stall until a save is durable, by step. slowdown: of steps during a
    save."""
    clock, durable_at, started_at = 0.0, math.inf, 0.0
    run = Simulated([], [])
    for step in range(1, steps + 1):
        before = clock
        is_due = timer.is_due
        taken = step_seconds(step) * (slowdown if durable_at < math.inf else 1.0)
        clock += taken
        timer.step(taken)
        if clock >= durable_at:
            timer.save_ended(durable_at - started_at)
            durable_at = math.inf
        if is_due:
            assert durable_at == math.inf, "a save would have to wait for the previous one"
            started_at, clock = clock, clock + stall
            durable_at = clock + persist(step)
            timer.save_started(stall)
            run.saved.append(step)
        run.seconds.append(clock - before)
    return run


seconds = st.floats(1e-4, 1e4)


@given(seconds, seconds, seconds, st.floats(1e-3, 1.0))
def test_the_interval_is_the_smallest_within_both_rules(
    step: float, stall: float, persist: float, share: float
) -> None:
    def keeps(steps: int) -> bool:
        slack = 1e-9
        return steps * step >= (stall + persist) - stall - slack * step and stall <= share * steps * step * (1 + slack)

    steps = interval(step, stall, stall + persist, share)
    assert steps >= 1
    assert keeps(steps)
    assert steps == 1 or not keeps(math.floor((steps - 1) * (1 - 1e-6)))


@given(
    step=st.floats(0.01, 10),
    stall=st.floats(0.01, 10),
    persist=st.floats(0.01, 100),
    slowdown=st.floats(1.0, 1.5),
    share=st.floats(0.01, 0.3),
)
def test_saves_cost_at_most_their_share(
    step: float, stall: float, persist: float, slowdown: float, share: float
) -> None:
    run = simulate(SaveTimer(share), 400, lambda number: step, stall, lambda number: persist, slowdown)
    first, last = run.saved[0], run.saved[-1]
    if len(run.saved) < 3:
        return
    # Whole intervals after the first save, which is made to measure.
    cost = sum(run.seconds[first : last - 1]) - (last - 1 - first) * step
    assert cost <= share * (last - first) * step + stall * 1e-6 + (slowdown - 1) * step


@pytest.mark.parametrize(
    ("step_seconds", "persist", "after", "interval_after"),
    [
        (lambda step: 1.0, lambda step: 3.0, 20, 20),
        (lambda step: 1.0 if step < 1000 else 4.0, lambda step: 3.0, 20, 5),
        (lambda step: 1.0 if step < 1000 else 0.25, lambda step: 3.0, 20, 80),
        (lambda step: 1.0, lambda step: 3.0 if step < 1000 else 90.0, 20, 91),
    ],
    ids=["constant", "slower steps", "faster steps", "slower disk"],
)
def test_the_interval_follows_steps_and_disk(
    step_seconds: Callable[[int], float], persist: Callable[[int], float], after: int, interval_after: int
) -> None:
    run = simulate(SaveTimer(0.05), 4000, step_seconds, 1.0, persist)
    assert run.saved[0] == FIRST_SAVE_STEPS
    assert run.saved[2] - run.saved[1] == after
    assert run.saved[-1] - run.saved[-2] == pytest.approx(interval_after, abs=1)


def test_minutes_alone_and_with_a_share() -> None:
    alone = simulate(SaveTimer(None, seconds_between=60.0), 200, lambda step: 7.0, 1.0, lambda step: 2.0)
    assert alone.saved[:3] == [9, 18, 27]
    with_share = simulate(SaveTimer(0.001, seconds_between=60.0), 200, lambda step: 7.0, 1.0, lambda step: 2.0)
    assert with_share.saved[-1] - with_share.saved[-2] <= 9


def test_a_failed_save_is_repeated_and_then_measured() -> None:
    timer = SaveTimer(0.1)
    for _ in range(FIRST_SAVE_STEPS):
        timer.step(1.0)
    timer.save_started(0.1)
    assert not timer.is_due
    timer.save_ended(None)
    assert timer.steps_between is None
    for _ in range(FIRST_SAVE_STEPS - 1):
        timer.step(1.0)
    assert timer.is_due
