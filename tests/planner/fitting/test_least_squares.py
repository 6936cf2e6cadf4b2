"""The search compared with numpy's closed form, and at its bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.fitting import Parameter, fit_parameters


def parameters(low: float = -1e3, high: float = 1e3) -> list[Parameter]:
    return [Parameter(name, low, high, 0.5, 0.01) for name in "abc"]


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_a_linear_problem_has_numpys_solution(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = np.eye(8, 3) + 0.3 * random.standard_normal((8, 3))
    target = random.standard_normal(8)
    solution = fit_parameters(lambda point: matrix @ point - target, parameters()).point
    expected, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    assert solution == pytest.approx(expected, abs=1e-3)


def test_a_bent_valley_is_followed() -> None:
    """Rosenbrock's function as two errors; its least is at (1, 1)."""
    result = fit_parameters(
        lambda point: np.array([1 - point[0], 3 * (point[1] - point[0] ** 2), point[2]]), parameters()
    ).point
    assert result == pytest.approx([1, 1, 0], abs=0.02)


def test_bounds_hold() -> None:
    result = fit_parameters(lambda point: point - np.array([5.0, -3.0, 0.25]), parameters(0.0, 1.0)).point
    assert result == pytest.approx([1.0, 0.0, 0.25], abs=1e-6)
