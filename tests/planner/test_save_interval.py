"""Young's interval against its published example and against a search for the least loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.planner.command.planning import lost_share, save_interval


def test_interval_for_40_second_saves_and_3_hour_failures() -> None:
    assert save_interval(40, 3 * 3600) == pytest.approx(930, abs=1)


@given(st.floats(0.01, 1e3), st.floats(1e3, 1e7), st.floats(0.1, 10))
def test_no_other_interval_loses_less(save: float, between: float, factor: float) -> None:
    best = save_interval(save, between)
    assert lost_share(best, save, between) <= lost_share(factor * best, save, between) * (1 + 1e-12)
