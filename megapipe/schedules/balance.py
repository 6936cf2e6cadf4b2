"""Assigning a model's layers to stages so that the slowest stage is as fast as it can be."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from megapipe.schedules.actions import Ints
from megapipe.schedules.errors import ScheduleError

ROUNDING: Final = 1e-12


def balance_layers(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers into contiguous stages with the smallest possible largest cost.

    Args:
        costs: time of every layer in order, embedding and head counted as layers of their own.
        num_stages: stages to fill, each with at least one layer.

    Returns:
        The half-open range of layers of each stage. If several cuts are equally good, the sum of squared costs of the
        stages decides.

    Raises:
        ScheduleError: more stages than layers, or a cost that is negative or infinite.
    """
    layers = np.asarray(costs, dtype=np.float64)
    if not 1 <= num_stages <= len(layers):
        raise ScheduleError(f"{len(layers)} layers cannot fill {num_stages} stages with at least one layer each")
    if not np.all(np.isfinite(layers)) or layers.min() < 0:
        raise ScheduleError(f"layer costs must be finite and not negative, got {list(costs)}")
    bottleneck = _smallest_bottleneck(layers, num_stages)
    cuts = _evenest_cuts(layers, num_stages, bottleneck * (1 + ROUNDING))
    return tuple((first, last) for first, last in pairwise(cuts.tolist()))


def check_assignment(sizes: Sequence[int], num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the range of layers of each stage from numbers of layers that the user sets; raises ScheduleError if they
    do not fit."""
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes, default=0) < 1:
        raise ScheduleError(
            f"layers per stage {list(sizes)} must be {num_stages} numbers of at least 1 with sum {num_layers}"
        )
    ends = np.cumsum(sizes).tolist()
    return tuple((end - size, end) for size, end in zip(sizes, ends, strict=True))


def _prefix(layers: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([[0.0], np.cumsum(layers)])


def _costs_of_runs(
    layers: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the cost of layers start to end - 1 at [end, start]; infinite if there are none."""
    total = _prefix(layers)
    runs = total[:, None] - total[None]
    runs[np.triu_indices(len(total))] = np.inf
    return runs


def _smallest_bottleneck(layers: np.ndarray[tuple[int], np.dtype[np.float64]], num_stages: int) -> float:
    """Return the smallest possible cost of the largest stage, by dynamic programming over stages and layers."""
    runs = _costs_of_runs(layers)
    best = np.full(len(runs), np.inf)
    best[0] = 0.0
    for _ in range(num_stages):
        best = np.maximum(best, runs).min(axis=1)
    return float(best[-1])


def _evenest_cuts(layers: np.ndarray[tuple[int], np.dtype[np.float64]], num_stages: int, limit: float) -> Ints:
    """Return the cut with the least sum of squares whose stages cost at most ``limit``, shape [stages + 1]."""
    runs = _costs_of_runs(layers)
    squares = np.where(runs <= limit, runs, np.inf) ** 2
    best = np.full(len(runs), np.inf)
    best[0] = 0.0
    came_from = np.zeros((num_stages, len(runs)), dtype=np.int64)
    for stage in range(num_stages):
        sums = best + squares
        came_from[stage] = sums.argmin(axis=1)
        best = sums.min(axis=1)
    cuts = np.zeros(num_stages + 1, dtype=np.int64)
    cuts[-1] = len(layers)
    for stage in range(num_stages - 1, -1, -1):
        cuts[stage] = came_from[stage, cuts[stage + 1]]
    return cuts
