"""Least squares for a handful of bounded parameters whose errors have no derivative at hand."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Parameter(NamedTuple):
    """A free parameter: its name, bounds, where the search starts, and the step that its slope is taken over."""

    name: str
    low: float
    high: float
    start: float
    step: float


def fit_parameters(errors: Callable[[Floats], Floats], parameters: Sequence[Parameter]) -> Floats:
    """The parameters with the least sum of squared errors near their start: Levenberg's method (1944) with slopes by
    difference, damped until a step is better, kept inside the bounds.

    errors: of a point [parameters]; shape [rows].
    """
    steps = np.array([each.step for each in parameters])
    low, high = (np.array([getattr(each, name) for each in parameters]) for name in ("low", "high"))
    point = np.array([each.start for each in parameters])
    found, damping = errors(point), _FIRST_DAMPING
    for _ in range(_ROUNDS):
        slopes = _slopes(errors, point, found, steps, high)
        better = None
        for _ in range(_TRIALS):
            moved = np.clip(point + _step(slopes, found, damping, point <= low, point >= high) * steps, low, high)
            tried = errors(moved)
            if tried @ tried < found @ found:
                better = moved, tried
                break
            damping *= _MORE
        if better is None:
            break
        gain = found @ found - better[1] @ better[1]
        point, found = better
        damping *= _LESS
        if gain < _ENOUGH:
            break
    return point


def spreads(
    errors: Callable[[Floats], Floats], parameters: Sequence[Parameter], point: Floats, error: float
) -> tuple[float, ...]:
    """One standard deviation of each parameter at the best point, where that of an error is `error`: roots of the
    diagonal of the inverse of the slopes' products, as in a linear problem.

    Infinite for parameters that no error depends on, and for all where some matter only together.
    """
    steps = np.array([each.step for each in parameters])
    high = np.array([each.high for each in parameters])
    slopes = _slopes(errors, point, errors(point), steps, high) / steps
    found = np.full(len(point), np.inf)
    told = np.flatnonzero(slopes.any(axis=0))
    if 0 < len(told) <= len(slopes):
        _, sizes, axes = np.linalg.svd(slopes[:, told], full_matrices=False)
        if sizes[-1] > _TOGETHER * sizes[0]:
            found[told] = error * np.sqrt(((axes / sizes[:, None]) ** 2).sum(axis=0))
    return tuple(map(float, found))


def _slopes(errors: Callable[[Floats], Floats], point: Floats, found: Floats, steps: Floats, high: Floats) -> Floats:
    """Changes of the errors over one step along each axis: [errors, parameters]."""
    return np.stack([_slope(errors, point, found, axis, steps, high) for axis in range(len(point))], axis=1)


def _step(slopes: Floats, found: Floats, damping: float, lowest: Bools, highest: Bools) -> Floats:
    """The damped step towards fewer errors, in units of the parameters' own steps; one that would leave its bound
    stays, and the others go as if it were no parameter."""
    free = np.ones(len(lowest), dtype=np.bool_)
    step = np.zeros(len(lowest))
    for _ in lowest:
        own = slopes[:, free]
        step[:] = 0.0
        step[free] = -np.linalg.solve(own.T @ own + damping * np.eye(own.shape[1]), own.T @ found)
        leaving = (lowest & (step < 0)) | (highest & (step > 0))
        if not leaving.any():
            break
        free &= ~leaving
    return np.where(free, step, 0.0)


def _slope(
    errors: Callable[[Floats], Floats], point: Floats, found: Floats, axis: int, steps: Floats, high: Floats
) -> Floats:
    """Change of the errors over one step along an axis, backwards where the bound is near."""
    moved = point.copy()
    moved[axis] += steps[axis] if point[axis] + steps[axis] <= high[axis] else -steps[axis]
    return (errors(moved) - found) / ((moved[axis] - point[axis]) / steps[axis])


_FIRST_DAMPING = 1e-3
_ROUNDS, _TRIALS = 40, 6
_MORE, _LESS = 5.0, 0.3
_ENOUGH = 1e-8
"""Of the search; the last is a gain in squared logarithms that ends it."""
_TOGETHER = 1e-9
"""Share of the greatest singular value below which the smallest is rounding."""
