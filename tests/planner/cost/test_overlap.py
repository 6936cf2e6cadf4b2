"""Properties of compute and communication that slow each other down."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.cost.layer_costs import overlapped

seconds = st.floats(0, 1e3)


@settings(max_examples=40)
@given(compute=seconds, communication=seconds, more=seconds, slow_down=st.floats(1, 2))
def test_overlap_is_monotone_and_between_parallel_and_serial(
    compute: float, communication: float, more: float, slow_down: float
) -> None:
    both = overlapped(compute, communication, slow_down)
    slack = 1e-9 * (1 + both)
    assert max(compute, communication) - slack <= both <= compute + communication + slack
    assert overlapped(compute + more, communication, slow_down) >= both - slack
    assert overlapped(compute, communication + more, slow_down) >= both - slack


@settings(max_examples=40)
@given(compute=st.floats(0.1, 100), step=st.floats(1e-9, 1e-3), slow_down=st.floats(1, 2))
def test_overlap_is_continuous_where_the_longer_side_changes(compute: float, step: float, slow_down: float) -> None:
    before, after = (overlapped(compute, compute + each, slow_down) for each in (-step, step))
    assert abs(after - before) <= 2 * slow_down * step + 1e-9
    assert overlapped(compute, compute, slow_down) == pytest.approx(slow_down * compute)


def test_the_longer_sides_rest_runs_at_full_speed() -> None:
    assert overlapped(3.0, 1.0, 1.3) == pytest.approx(1.3 + 2.0)
    assert overlapped(1.0, 3.0, 1.3) == pytest.approx(1.3 + 2.0)
    assert overlapped(2.0, 0.0, 1.3) == 2.0
